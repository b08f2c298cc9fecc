"""The baseline on transformers computes what a run of the population does."""

from __future__ import annotations

import pytest
import torch

from analysis.chapters.plain_grpo import BETA
from analysis.records.config import Run
from analysis.records.language import PretrainedConfig
from analysis.records.variants import Variant
from analysis.studies.presets.language import llama_smoke
from analysis.training.pretrained.tasks import TextTask, pretrained_environment
from analysis.training.pretrained.weights import load_llama, random_llama, save_llama
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.term import KLTerm

transformers = pytest.importorskip("transformers", reason="the extra lm is not installed")
pytestmark = pytest.mark.peers

QUESTIONS = [[5, 6, 7, 9], [5, 6, 8, 3, 9], [5, 4, 9], [5, 6, 4, 9]]
CONFIG = PretrainedConfig(updates=4, num_prompts=3, group_size=4, learning_rate=1e-2)
LLAMA = llama_smoke().config.model.llama


def of(adapters, name, side):
    """One projection's part of the first run, by the name of the baseline."""
    block, projection = name.split(".")
    return adapters[f"{projection}.{side}"][0, int(block.removeprefix("block"))].T


def first_is_low(place, tokens):
    return float(list(tokens[:1]) < [6])


@pytest.fixture
def task():
    return TextTask(QUESTIONS, first_is_low, end_tokens=[0, 1], completion_length=3)


@pytest.fixture
def plain(tmp_path, task):
    from benchmarks.plain_transformers import PlainLlamaTrainer

    save_llama(random_llama(LLAMA, 3, torch.float32), tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    return PlainLlamaTrainer(model, CONFIG, task, seed=0)


def test_loss_and_gradient_are_those_of_a_run(tmp_path, task, plain):
    setting = pretrained_environment(CONFIG, load_llama(tmp_path, torch.float32), task)
    variant = Variant(kl=KLTerm(estimator="k3"), beta=BETA)
    trainer = PopulationTrainer(CONFIG, [Run(variant=variant, seed=1)], setting)
    with torch.no_grad():  # away from the reference
        trainer.weights += 0.3 * torch.randn(trainer.weights.shape)
    ours = setting.policy.unflatten(trainer.weights)
    assert len(plain.adapters) == 2 * 7
    for name, part in plain.adapters.items():
        part.a.data, part.b.data = (of(ours, name, side).detach().clone() for side in "AB")
    drawn = trainer.rollout(0)
    output, gradient = trainer.gradient(trainer.batch(drawn))
    assert 0 < drawn.scores.rewards.mean() < 1, "equal rewards leave only the KL"
    loss = plain.loss(drawn.rollout.prompts[0], drawn.rollout.completions[0])
    loss.backward()
    assert loss.item() == pytest.approx(output.losses.item(), abs=1e-5)
    grads = setting.policy.unflatten(gradient)
    for name, part in plain.adapters.items():
        assert torch.allclose(part.a.grad, of(grads, name, "A"), rtol=1e-3, atol=1e-5)
        assert torch.allclose(part.b.grad, of(grads, name, "B"), rtol=1e-3, atol=1e-5)
    assert max(part.b.grad.abs().max() for part in plain.adapters.values()) > 1e-3


def test_it_samples_what_it_scores_and_trains_its_adapters_alone(plain):
    prompts = plain.task.prompts(torch.tensor([[[0.1], [0.4], [0.6]]], dtype=torch.float64))[0]
    completions = plain.sample(prompts)
    assert completions.shape == (3, 4, 3)
    before = {name: value.clone() for name, value in plain.model.state_dict().items()}
    for _ in range(4):
        plain.update()
    moved = {n for n, v in plain.model.state_dict().items() if not torch.equal(v, before[n])}
    assert moved and all(name.endswith((".a", ".b")) for name in moved)


def test_both_take_turns_on_one_model(tmp_path, task, plain, monkeypatch):
    from analysis.records.language import FolderModel, LanguageConfig
    from benchmarks import language

    config = LanguageConfig(
        **CONFIG.model_dump() | {"log_every": 2}, model=FolderModel(path=str(tmp_path))
    )
    llama = load_llama(tmp_path, torch.float32)
    monkeypatch.setattr(
        language, "environment_of", lambda *_: pretrained_environment(config, llama, task)
    )
    heard = []
    rounds = language.run(config, torch.device("cpu"), (1, 3), 2, heard.append)
    assert len(heard) == 3 + 3 * 3 and rounds["round"].to_list() == [0, 0, 0, 1, 1, 1]
    assert set(zip(rounds["trainer"], rounds["runs"], strict=True)) == {
        (language.TRANSFORMERS, 1),
        ("population", 1),
        ("population", 3),
    }
    assert (rounds["seconds"] > 0).all()
