"""The ablation's populations, each with the predictions made before it was run."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeFloat, model_validator

from analysis.experiments.language_models.config import LanguageConfig
from analysis.kl.term import KLTerm
from analysis.schema import Schema
from analysis.training.config import Arm, Member, StartConfig, TrainConfig


class Preset(Schema):
    """A population: arms x seeds, what its members share, and what it is expected to show."""

    name: str
    config: TrainConfig | LanguageConfig
    arms: tuple[Arm, ...] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    #: Stated before the run, from theory and from searches on other seeds.
    predictions: tuple[str, ...]

    @model_validator(mode="after")
    def _arms_have_names_of_their_own(self) -> Preset:
        keys = [(arm.name, arm.beta) for arm in self.arms]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"two arms share name and beta {twice[0]}: give them labels")
        return self

    @property
    def members(self) -> tuple[Member, ...]:
        """Arms in order, the seeds of each together."""
        return tuple(Member(arm=arm, seed=seed) for arm in self.arms for seed in self.seeds)


def kl_arms(beta: float) -> tuple[Arm, ...]:
    """Seven ways to use the KL at one beta: k1, k2, k3, exact as loss; k1, k2, k3 in reward."""
    losses = [Arm(kl=KLTerm(estimator=name), beta=beta) for name in ("k1", "k2", "k3", "exact")]
    rewards = [
        Arm(kl=KLTerm(estimator=name, placement="reward"), beta=beta) for name in ("k1", "k2", "k3")
    ]
    return (*losses, *rewards)


NO_KL = Arm()

PREDICTIONS = (
    "k1 as a loss ends as far from the reference as no KL term: its expected gradient is zero.",
    "k2 as a loss ends at the exact reverse KL of the exact arm: on-policy it has its gradient.",
    "k1 in the reward ends near k2 as a loss: the same divergence, credited to earlier tokens too.",
    "k3 as a loss ends elsewhere than k2 as a loss: its expected gradient is the forward KL's.",
    "k2 and k3 in the reward do not hold the policy at the reference: they are no KL gradient.",
    "At this step size, holding the policy near the reference ends at the higher accuracy.",
)

#: Found by search on seeds 0 to 2: a step size at which the policy drifts far enough for the KL
#: term to matter. At half of it accuracy rises in every arm but k3 in the reward, and the arms
#: differ less.
CONFIG = TrainConfig(start=StartConfig(updates=150), learning_rate=2e-3, cosine_every=50)


def train_config(**changes: Any) -> TrainConfig:
    """``CONFIG`` with some fields changed, validated."""
    return TrainConfig(**(CONFIG.model_dump() | changes))


#: Of one population; more is a slip of the keyboard, and its list of members alone takes minutes.
MOST_SEEDS = 10_000


def fresh_seeds(first: int, count: int) -> tuple[int, ...]:
    """Seeds from ``first`` on; each preset has its own range, which no search has seen.

    Raises:
        ValueError: more than ``MOST_SEEDS``.
    """
    if count > MOST_SEEDS:
        raise ValueError(f"num_seeds must be at most {MOST_SEEDS:,}, not {count:,}")
    return tuple(range(first, first + count))


def quick(
    *,
    beta: NonNegativeFloat = 0.3,
    learning_rate: float = CONFIG.learning_rate,
    updates: int = CONFIG.updates,
    num_seeds: int = 3,
) -> Preset:
    """Eight arms at one beta, half a minute on one core."""
    config = CONFIG.model_copy(update={"learning_rate": learning_rate, "updates": updates})
    return Preset(
        name="quick",
        config=TrainConfig.model_validate(config.model_dump()),
        arms=(NO_KL, *kl_arms(beta)),
        seeds=fresh_seeds(0, num_seeds),
        predictions=PREDICTIONS,
    )


#: Seeds that no search has seen.
FULL = Preset(
    name="full",
    config=CONFIG.model_copy(update={"log_every": 10}),
    arms=(NO_KL, *kl_arms(0.1), *kl_arms(0.3), *kl_arms(1.0)),
    seeds=tuple(range(100, 110)),
    predictions=PREDICTIONS,
)

#: Does the ranking survive where drifting hurts less? The same seeds at half the step size.
HALF_STEP = Preset(
    name="half_step",
    config=FULL.config.model_copy(update={"learning_rate": CONFIG.learning_rate / 2}),
    arms=(NO_KL, *kl_arms(0.3)),
    seeds=FULL.seeds,
    predictions=(
        "The order of the arms in exact reverse KL is that of the full step size.",
        "Accuracy with no KL term is nearer to that of the arms that hold the policy.",
    ),
)

#: Does it hang on the one start that all seeds share? The same with a start for each seed.
STARTS = Preset(
    name="starts",
    config=FULL.config.model_copy(
        update={"start": CONFIG.start.model_copy(update={"seed": 1, "count": 10}), "log_every": 10}
    ),
    arms=(NO_KL, *kl_arms(0.3)),
    seeds=fresh_seeds(150, 10),
    predictions=(
        "Each of the comparisons of the full preset that excludes zero there has the same sign.",
    ),
)
