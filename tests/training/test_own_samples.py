"""What the policy itself samples, whoever samples for training; and rejection sampling."""

from __future__ import annotations

import pytest
import torch

from analysis.records.config import SortTask, StartConfig, TeacherConfig
from analysis.records.variants import Advantage, Distillation, Sampler, Variant
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.term import KLTerm
from tests.training.conftest import runs_of

pytestmark = pytest.mark.slow

RL = Variant()
CLONING = Variant(
    label="cloning",
    advantage=Advantage(baseline="zero"),
    sampler=Sampler(by="teacher"),
    distillation=Distillation(kl=KLTerm(estimator="cross_entropy")),
)
HOT = Variant(label="hot", sampler=Sampler(temperature=3.0))
STALE = Variant(label="stale", sampler=Sampler(staleness=3))


def taught(config):
    """Easy enough for a start that is sometimes right and a teacher that mostly is."""
    return config.model_copy(
        update={
            "task": SortTask(num_digits=2, end_token=True, max_fillers=2),
            "start": StartConfig(updates=100, batch_size=64),
            "teacher": TeacherConfig(start=StartConfig(updates=400, batch_size=64)),
            "num_prompts": 6,
        }
    )


def metrics_of(config, *variants):
    return PopulationTrainer(config, runs_of(variants, [1])).run().metrics


def test_a_policy_that_samples_for_itself_is_its_own(small_config):
    metrics = metrics_of(small_config, RL)
    assert (metrics["own_accuracy"] == metrics["accuracy"]).all()
    assert (metrics["own_length"] == metrics["length"]).all()


def test_at_one_start_all_samplers_leave_the_policy_the_same_accuracy(small_config):
    config = taught(small_config).model_copy(update={"updates": 1, "log_every": 1})
    (own,), (sampled,) = (
        metrics_of(config, RL, CLONING, HOT)[name] for name in ("own_accuracy", "accuracy")
    )
    assert own[0] == own[1] == own[2] == sampled[0]
    assert sampled[1] > sampled[0] > sampled[2]


def test_a_stale_sampler_lags_and_the_policy_itself_does_not(small_config):
    config = taught(small_config)
    stale, fresh, start = (PopulationTrainer(config, runs_of([v], [1])) for v in (STALE, RL, RL))
    for _ in range(3):
        stale.advance()
    with torch.no_grad():
        fresh.weights.copy_(stale.weights)
    sampled = stale.rollout(3)
    own = stale.samplers.on_policy(sampled, 3)
    assert torch.equal(sampled.rollout.completions, start.rollout(3).rollout.completions)
    now = fresh.rollout(3)
    assert torch.equal(own.scores.accuracy, now.scores.accuracy)
    assert torch.equal(own.rollout.mask, now.rollout.mask)
    assert not torch.equal(own.rollout.mask, sampled.rollout.mask)
