"""Small populations that every training test can afford."""

from __future__ import annotations

import pytest

from analysis.kl.term import KLTerm
from analysis.training.config import Arm, StartConfig, TrainConfig
from analysis.training.policy import PolicyConfig
from analysis.training.tasks import SortTask


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
def all_arms() -> list[Arm]:
    """Every combination that a configuration accepts, with a beta that is felt."""
    beta = 0.7
    losses = [
        Arm(kl=KLTerm(estimator=estimator, weighting=weighting), beta=beta)
        for estimator in ("k1", "k2", "k3")
        for weighting in ("none", "attached", "detached")
    ]
    rewards = [
        Arm(kl=KLTerm(estimator=estimator, placement="reward"), beta=beta)
        for estimator in ("k1", "k2", "k3")
    ]
    return [Arm(), Arm(kl=KLTerm(estimator="exact"), beta=beta), *losses, *rewards]
