"""Answers at so many nats: the reward, the reader's KL by another route, and what is recorded."""

from __future__ import annotations

import math

import pytest
import torch

from analysis.records import nats as recorded_nats
from analysis.records.config import Run
from analysis.records.manifests import read_manifest
from analysis.records.variants import Variant
from analysis.studies.language import nats
from analysis.studies.presets.language import llama_smoke
from analysis.training.pretrained.tasks import pretrained_environment
from analysis.training.pretrained.weights import random_llama
from analysis.training.trainer import PopulationTrainer

END = 2
PROMPTS = [[5, 6, 7, 9], [5, 8, 9], [5, 6, 3, 4, 9], [5, 4, 4, 9], [5, 3, 9], [5, 7, 7, 9]]


def test_the_reward_is_letters_per_word_and_signs_are_none() -> None:
    assert nats.letters_per_word("ab cde") == 2.5
    assert nats.letters_per_word("ab, (cde) 12!") == pytest.approx(5 / 3)
    assert nats.letters_per_word("  ") == 0.0


def replies(reward) -> nats.Replies:
    return nats.Replies(PROMPTS, reward, END)


def test_an_answer_is_rewarded_up_to_its_end_and_need_not_end() -> None:
    seen = []

    def reward(tokens) -> float:
        seen.append(list(tokens))
        return len(tokens) / 10

    completions = torch.tensor([[[[4, END, 7], [4, 5, 6]]]])
    scores = replies(reward).score(torch.tensor([[PROMPTS[0][:-1]]]), completions)
    assert seen == [[4, END], [4, 5, 6]]
    assert scores.rewards.tolist() == [[[pytest.approx(0.2), pytest.approx(0.3)]]]


@pytest.fixture(scope="module")
def trainer() -> PopulationTrainer:
    smoke = llama_smoke().config
    model = random_llama(smoke.model.llama, 0, torch.float32)
    task = replies(lambda tokens: 0.1 * len(set(tokens)) / len(tokens))
    environment = pretrained_environment(smoke, model, task)
    return PopulationTrainer(smoke, [Run(variant=Variant(), seed=0)], environment)


def test_a_run_is_trained_on_its_replies() -> None:
    smoke = llama_smoke().config
    model = random_llama(smoke.model.llama, 0, torch.float32)
    environment = pretrained_environment(smoke, model, replies(lambda tokens: len(tokens) / 10))
    fresh = PopulationTrainer(smoke, [Run(variant=Variant(), seed=0)], environment)
    logged = fresh.update(0)
    assert 0 < logged["reward"].item() <= nats.LONGEST / 10


def test_the_kl_of_a_reading_is_the_sum_over_the_vocabulary_at_its_own_states(trainer) -> None:
    reader = nats.Reader(trainer, trainer.samplers.environment.task, str, len(PROMPTS))
    before, said = reader.read()
    assert before["reverse_kl"] == pytest.approx(0.0, abs=1e-9)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        trainer.weights.add_(0.6 * torch.randn(trainer.weights.shape, generator=generator))
    moved, others = reader.read()
    assert moved["reverse_kl"] > 0.01 and others != said
    assert reader.read() == (moved, others)
    adapters = trainer.policy.unflatten(trainer.weights.detach())
    total, states = 0.0, 0
    for place, answer in enumerate(others):
        tokens = [int(token) for token in answer.strip("[]").split(", ")]
        prompt = PROMPTS[place]
        for step in range(len(tokens)):
            inputs = torch.tensor([prompt[-1], *tokens[:step]]).view(1, 1, 1, -1)
            prompts = torch.tensor(prompt[:-1]).view(1, 1, -1)
            both = (
                trainer.policy.logits(of, prompts, inputs)[0, 0, 0, -1].double()
                for of in (adapters, trainer.reference)
            )
            logp, ref_logp = (torch.log_softmax(logits, -1) for logits in both)
            total += float((logp.exp() * (logp - ref_logp)).sum())
            states += 1
    assert moved["reverse_kl"] == pytest.approx(total / states, rel=1e-4)


def test_the_recorded_run_begins_at_the_reference_and_leaves_it() -> None:
    read_manifest(recorded_nats.RECORDED)
    path, answers = recorded_nats.recorded()
    assert path["update"].iloc[0] == 0
    assert path["reverse_kl"].iloc[0] == pytest.approx(0.0, abs=1e-6)
    assert path["reverse_kl"].is_monotonic_increasing and path["reverse_kl"].iloc[-1] > 0.2
    assert path["letters"].max() > path["letters"].iloc[0]
    assert answers.groupby("update").size().eq(nats.READ).all()
    assert set(answers["update"]) == set(path["update"])
    assert not math.isnan(path["forward_kl"].sum())
