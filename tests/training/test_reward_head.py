"""Adapters that are rewarded by a head on the frozen model, against states read one at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from analysis.records.config import Run
from analysis.records.language import LanguageConfig, RewardHead
from analysis.records.metrics import FINAL_METRICS, METRICS
from analysis.records.variants import Advantage, Variant
from analysis.studies.presets import make_preset
from analysis.studies.presets.language import llama_smoke
from analysis.sweeps.provenance import sources_of
from analysis.sweeps.store import run_key
from analysis.training.environment_of import environment_of
from analysis.training.pretrained import reward_head
from analysis.training.pretrained.llama import PAD
from analysis.training.pretrained.weights import random_llama
from analysis.training.tiny.tasks import Sorting
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.term import KLTerm
from tests.training.conftest import runs_of
from tests.training.short_presets import questions

K2 = Variant(kl=KLTerm(estimator="k2"), beta=0.5)
HEAD = RewardHead(labels=30, ridge=0.5, seed=4, count=3)
CONFIG = llama_smoke().config.model_copy(
    update={"reward_model": HEAD, "updates": 4, "log_every": 2, "final_answers": 24}
)


def of(config: LanguageConfig = CONFIG, **changes) -> LanguageConfig:
    """The same with another head."""
    return config.model_copy(update={"reward_model": HEAD.model_copy(update=changes)})


def trainer_of(runs: list[Run], config: LanguageConfig = CONFIG) -> PopulationTrainer:
    return PopulationTrainer(config, runs, environment_of(config))


def state_of_each(policy, model, prompt, tokens) -> torch.Tensor:
    """What the output layer reads behind a prompt and some tokens, recovered from its logits."""
    inputs = torch.tensor(tokens).view(1, 1, 1, -1)
    logits = policy.logits({}, prompt.view(1, 1, -1), inputs)[0, 0, 0, -1]
    return torch.linalg.lstsq(model.head, logits.unsqueeze(-1)).solution.squeeze(-1)


def test_a_run_is_rewarded_by_the_head_of_its_seed_at_the_end_of_the_answer():
    config = CONFIG.model_copy(update={"precision": "float64"})
    model = random_llama(config.model.llama, 0, torch.float64)
    trainer = trainer_of(runs_of([Variant()], (0, 2, 4)), config)
    sampled = trainer.rollout(0)
    task, rollout = trainer.samplers.environment.task, sampled.rollout
    truth = Sorting(config.task).score(rollout.prompts, rollout.completions)
    assert torch.equal(sampled.scores.gold, truth.rewards)
    assert torch.equal(sampled.scores.accuracy, truth.accuracy) and sampled.scores.steps is None
    lengths = rollout.mask.sum(dim=-1)
    assert lengths.min() < lengths.max(), "answers that end early are among them"
    for row, head in enumerate((0, 2, 1)):
        for place in range(config.num_prompts):
            answer = rollout.completions[row, place, 1, : lengths[row, place, 1]].tolist()
            tokens = [task.bos_token, *answer]
            state = state_of_each(trainer.policy, model, rollout.prompts[row, place], tokens)
            scores = (task.models.heads.weights @ state + task.models.heads.offsets).tolist()
            assert sampled.scores.rewards[row, place, 1].item() == pytest.approx(
                scores[head], abs=1e-9
            )
            assert min(abs(scores[head] - scores[n]) for n in range(3) if n != head) > 1e-6


def test_questions_of_any_length_are_read_as_they_are_alone():
    environment = questions("cpu")
    task, policy = environment.task, environment.policy
    prompts = task.prompts(torch.tensor([[[0.1], [0.5], [0.9]]]))
    assert (prompts == PAD).any() and task.shared
    completions = torch.tensor([[[[4, 0, 7], [4, 5, 6]]] * 3])
    states = reward_head.last_states(policy, task, prompts, completions)
    for place in range(3):
        real = prompts[0, place][prompts[0, place] != PAD].view(1, 1, -1)
        for answer, tokens in enumerate(([4, 0], [4, 5, 6])):
            inputs = torch.tensor([task.bos_token, *tokens]).view(1, 1, 1, -1)
            alone = policy.states({}, real, inputs)[0, 0, 0, -1]
            assert torch.allclose(states[0, place, answer], alone, rtol=0, atol=1e-12)


def test_a_head_is_the_least_squares_of_its_labels():
    generator = torch.Generator().manual_seed(2)
    states = 3 + 2 * torch.randn(20, 6, dtype=torch.float64, generator=generator)
    states[:, 5] = 1.5  # a channel that says nothing
    labels = (states[:, 0] > 3).double()
    weights, offset = reward_head.ridge(states, labels, 0.3)
    scale = states.std(dim=0, unbiased=False)
    v = (weights * scale).requires_grad_()
    b = (offset + weights @ states.mean(dim=0)).requires_grad_()
    z = (states - states.mean(dim=0)) / scale.clamp(min=1e-6)
    loss = (z @ v + b - labels).square().mean() + 0.3 * v.square().sum()
    gradients = torch.autograd.grad(loss, (v, b))
    assert max(part.abs().max().item() for part in gradients) < 1e-12
    assert torch.allclose(z @ v + b, states @ weights + offset, atol=1e-12)
    assert weights[0] > 0.05 and weights[5] == 0
    flipped, _ = reward_head.ridge(states, 1 - labels, 0.3)
    assert torch.allclose(flipped, -weights, atol=1e-12)


def test_gold_and_proxy_are_logged_and_training_reads_the_proxy_alone(monkeypatch):
    runs = runs_of([Variant(), K2], (0, 1))
    record = trainer_of(runs).run()
    assert set(record.metrics) == {*METRICS, "gold", "proxy"} == set(CONFIG.logs)
    assert set(record.final) == {*FINAL_METRICS, "final_gold", "final_proxy"}
    np.testing.assert_array_equal(record.metrics["proxy"], record.metrics["reward"])
    assert (np.abs(record.metrics["gold"] - record.metrics["proxy"]) > 1e-3).any()

    exact = Sorting.score

    def upside_down(self, *given):
        scores = exact(self, *given)
        return scores._replace(rewards=1 - scores.rewards)

    flipped = trainer_of(runs)
    monkeypatch.setattr(Sorting, "score", upside_down)
    again = flipped.run()
    np.testing.assert_allclose(again.metrics["gold"], 1 - record.metrics["gold"], atol=1e-6)
    for name in {*METRICS, "proxy"}:
        np.testing.assert_array_equal(again.metrics[name], record.metrics[name])


def test_a_run_that_is_resumed_goes_on_to_the_same_bits():
    runs = runs_of([Variant(), K2], (0, 1))
    straight, resumed = trainer_of(runs), trainer_of(runs)
    for _ in range(CONFIG.updates):
        straight.advance()
        resumed.advance()
        state, resumed = resumed.state(), trainer_of(runs)
        resumed.restore(state)
    assert torch.equal(resumed.weights, straight.weights)
    left, right = resumed.record(), straight.record()
    for name in {*METRICS, "gold", "proxy"}:
        assert left.metrics[name].tobytes() == right.metrics[name].tobytes()


def test_the_head_of_a_seed_does_not_depend_on_the_other_heads_and_few_labels_begin_many():
    several = environment_of(CONFIG).task.models.heads
    assert several.weights.shape == (3, CONFIG.model.llama.width)
    for place in range(3):
        alone = environment_of(of(seed=4 + place, count=1)).task.models.heads
        assert torch.equal(alone.weights[0], several.weights[place])
    assert (several.weights[0] - several.weights[1]).norm() > 0.01 * several.weights[0].norm()
    plain = environment_of(CONFIG.model_copy(update={"reward_model": None}))
    made = plain.policy, plain.task
    few, many = (
        reward_head.labelled(*made, of(labels=n), seed=5) for n in (reward_head.CHUNK - 1, 130)
    )
    for less, more in zip(few, many, strict=True):
        assert torch.equal(less, more[: len(less)]) and len(more) == 130


def test_several_heads_must_be_told_apart():
    task = environment_of(CONFIG).task
    with pytest.raises(ValueError, match="give starts: there are 3 reward models"):
        task.score(torch.zeros(2, 1, 3, dtype=torch.long), torch.zeros(2, 1, 1, 4).long())


def test_no_variant_of_such_runs_may_read_the_verifier():
    with pytest.raises(ValueError, match="level='process' reads the verifier"):
        trainer_of(runs_of([Variant(advantage=Advantage(level="process"))]))


def test_runs_without_a_head_keep_their_names_and_a_head_is_part_of_one():
    without = CONFIG.model_copy(update={"reward_model": None})
    assert "reward_model" not in without.model_dump()
    assert LanguageConfig(**without.model_dump()) == without
    assert LanguageConfig.model_validate_json(CONFIG.model_dump_json()) == CONFIG
    keys = {run_key(c, runs_of([K2])[0]) for c in (CONFIG, without, of(labels=31), of(seed=5))}
    assert len(keys) == 4
    preset = llama_smoke()
    assert run_key(preset.config, preset.runs[-1]) == "e4ed5213bfa02968e5eab595"
    assert any(name.endswith("pretrained/reward_head.py") for name in sources_of(CONFIG))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"reward_modle": {}}, r"got 'reward_modle'; did you mean 'reward_model'\?"),
        ({"reward_model": {"label": 5}}, r"reward_model\.label: Extra inputs"),
        ({"reward_model": {"ridge": 0.0}}, "reward_model.ridge: Input should be greater than 0"),
    ],
)
def test_a_slip_on_the_command_line_is_named(override, said):
    with pytest.raises(ValueError, match=said):
        make_preset("llama_smoke", override)
