"""Small populations that every training test can afford."""

from __future__ import annotations

import pytest

from analysis.records.config import (
    PolicyConfig,
    Run,
    SortTask,
    StartConfig,
    TeacherConfig,
    TrainConfig,
)
from analysis.records.language import LlamaConfig
from analysis.records.variants import Variant
from kl_term.kl.term import KLTerm

#: Of another size than the policy.
TEACHER = TeacherConfig(
    start=StartConfig(updates=30, batch_size=16),
    policy=PolicyConfig(width=24, num_layers=1, num_heads=3),
)


def llama(**sizes) -> LlamaConfig:
    """One layer of two heads that share their keys, unless a test says otherwise."""
    small = {
        "vocab_size": 12,
        "width": 8,
        "inner": 12,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "norm_eps": 1e-5,
        "rope_theta": 100.0,
        "tied": False,
    }
    return LlamaConfig(**small | sizes)


def runs_of(variants, seeds=(0,)) -> list[Run]:
    """Each variant under each seed."""
    return [Run(variant=variant, seed=seed) for variant in variants for seed in seeds]


def what_is_sampled(trainer) -> list:
    """What the trainer samples from now on, one entry an update."""
    sampled, make_batch = [], trainer.batch

    def batch(one, update, **measured):
        sampled.append(one)
        return make_batch(one, update, **measured)

    trainer.batch = batch
    return sampled


@pytest.fixture(autouse=True)
def alone(one_thread):
    """Each test here trains on one thread."""


@pytest.fixture
def small_config() -> TrainConfig:
    """A few milliseconds an update; sizes that are no multiple of a vector register."""
    return TrainConfig(
        task=SortTask(num_digits=3, end_token=True, reward="graded"),
        policy=PolicyConfig(width=12, num_layers=2, num_heads=3),
        start=StartConfig(updates=20, batch_size=16),
        updates=6,
        num_prompts=3,
        group_size=5,
        log_every=2,
    )


@pytest.fixture
def all_variants() -> list[Variant]:
    """Every combination that a configuration accepts, with a beta that is felt."""
    beta = 0.7
    losses = [
        Variant(kl=KLTerm(estimator=estimator, weighting=weighting), beta=beta)
        for estimator in ("k1", "k2", "k3")
        for weighting in ("none", "attached", "detached")
    ]
    rewards = [
        Variant(kl=KLTerm(estimator=estimator, placement="reward"), beta=beta)
        for estimator in ("k1", "k2", "k3")
    ]
    return [Variant(), Variant(kl=KLTerm(estimator="exact"), beta=beta), *losses, *rewards]
