"""The reward side: what a group's rewards are divided by, and who gets the credit.

Settings were found by search on seeds 0 to 2.
"""

from __future__ import annotations

from typing import Literal

from analysis.experiments.ablations.methods.parts import CENTRED, GROUP_STD, plain
from analysis.experiments.ablations.presets import CONFIG, Preset, fresh_seeds, train_config
from analysis.training.arms import Advantage, Arm, Shaping
from analysis.training.config import StartConfig, TrainConfig
from analysis.training.tasks import SortTask

#: How a group's rewards become advantages, by name.
ADVANTAGES = {
    "group_std": GROUP_STD,
    "std_min": Advantage(std_min=0.1),
    "group_centre": CENTRED,
    "leave_one_out": Advantage(baseline="leave_one_out"),
    "drop_uniform": Advantage(drop_uniform_groups=True),
}


def near_ties(
    *,
    noise: float = 0.01,
    learning_rate: float = CONFIG.learning_rate,
    num_seeds: int = 10,
    updates: int = 200,
) -> Preset:
    """Five advantages on exact rewards, and on rewards with noise too small to matter."""
    return Preset(
        name="near_ties",
        config=train_config(
            updates=updates,
            learning_rate=learning_rate,
            start=StartConfig(updates=110),
            log_every=20,
            cosine_every=0,
        ),
        arms=tuple(
            plain(f"{name}{suffix}", advantage=advantage, shaping=Shaping(noise=width))
            for suffix, width in (("", 0.0), ("_noisy", noise))
            for name, advantage in ADVANTAGES.items()
        ),
        seeds=fresh_seeds(1060, num_seeds),
        predictions=(
            "Without noise the five end alike.",
            "Noise of a hundredth of the reward ruins division by the standard deviation: it ends "
            "at less than a third of the accuracy that it has without noise.",
            "A floor of 0.1 under the standard deviation, and no division at all, end as accurate "
            "with noise as without.",
            "Dropping groups of equal rewards does not help against noise: no two rewards are "
            "equal, so it is group_std to the bit.",
        ),
    )


def process(*, num_seeds: int = 10, updates: int = 300) -> Preset:
    """Credit for a right outcome, for every right step, and for what a token adds to the score."""
    marginal = Advantage(level="marginal", baseline="group_centre")
    return Preset(
        name="process",
        config=_credited("exact", updates),
        arms=(
            plain("outcome"),
            plain("outcome_centre", advantage=CENTRED),
            plain("process", advantage=Advantage(level="process")),
            MARGINAL,
            plain("marginal_centre", advantage=marginal),
        ),
        seeds=fresh_seeds(1100, num_seeds),
        predictions=(
            "Step rewards of a perfect verifier learn faster than its outcome: process and "
            "marginal reach an accuracy of 0.1 in fewer updates.",
            "They also end more accurate than the outcome.",
            "The gain is small: less than a factor of two in accuracy at the end.",
            "The division by the standard deviation makes no visible difference to marginal "
            "rewards.",
        ),
    )


def process_graded(*, num_seeds: int = 10, updates: int = 300) -> Preset:
    """The same rewards, the outcome now the share of right positions: is it density or credit?"""
    return Preset(
        name="process_graded",
        config=_credited("graded", updates),
        arms=(plain("outcome"), plain("outcome_centre", advantage=CENTRED), MARGINAL),
        seeds=fresh_seeds(1100, num_seeds),
        predictions=(
            "Marginal rewards do not read the outcome: the arm is that of the preset process, to "
            "the bit.",
            "A graded outcome ends no more accurate than an exact one: what the steps gain is "
            "their credit, not that partly right answers count.",
            "Marginal rewards end more accurate than the graded outcome, which they sum to.",
        ),
    )


MARGINAL: Arm = plain("marginal", advantage=Advantage(level="marginal"))


def _credited(reward: Literal["exact", "graded"], updates: int) -> TrainConfig:
    """From a start that is right once in thirty."""
    return train_config(
        updates=updates,
        learning_rate=1e-3,
        task=SortTask(reward=reward),
        start=StartConfig(updates=70),
        log_every=20,
        cosine_every=0,
    )
