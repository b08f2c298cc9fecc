"""What presets are made of: variants that many of them share, and the configuration they change."""

from __future__ import annotations

from typing import Any

from analysis.records.config import StartConfig, TrainConfig
from analysis.records.variants import Advantage, Variant
from kl_term.kl.choice import KLChoice

NO_KL = Variant()
#: The group's mean taken off, over its standard deviation; and nothing divided.
GROUP_STD = Advantage()
CENTRED = Advantage(baseline="group_centre")


def kl_variants(beta: float) -> tuple[Variant, ...]:
    """Seven ways to use the KL at one beta: k1, k2, k3, exact as loss; k1, k2, k3 in reward."""
    losses = [
        Variant(kl=KLChoice(estimator=name), beta=beta) for name in ("k1", "k2", "k3", "exact")
    ]
    rewards = [
        Variant(kl=KLChoice(estimator=name, placement="reward"), beta=beta)
        for name in ("k1", "k2", "k3")
    ]
    return (*losses, *rewards)


#: Found by search on seeds 0 to 2: a step size at which the policy drifts far enough for the KL
#: term to matter. At half of it accuracy rises in every variant but k3 in the reward, and the
#: variants differ less.
CONFIG = TrainConfig(start=StartConfig(updates=150), learning_rate=2e-3, cosine_every=50)


def train_config(**changes: Any) -> TrainConfig:
    """``CONFIG`` with some fields changed, validated."""
    return TrainConfig(**(CONFIG.model_dump() | changes))
