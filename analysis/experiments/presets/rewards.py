"""The reward side: what a group's rewards are divided by, what length costs, who gets the credit.

Settings were found by search on seeds 0 to 2.
"""

from __future__ import annotations

from analysis.experiments.preset import (
    CENTRED,
    CONFIG,
    GROUP_STD,
    Preset,
    fresh_seeds,
    population,
    preset,
)
from analysis.training.config import StartConfig
from analysis.training.tiny.tasks import SortTask
from analysis.training.variants import Advantage, Objective, Sampler, Shaping, Variant

#: How a group's rewards become advantages, by name.
ADVANTAGES = {
    "group_std": GROUP_STD,
    "std_min": Advantage(std_min=0.1),
    "group_centre": CENTRED,
    "leave_one_out": Advantage(baseline="leave_one_out"),
    "drop_uniform": Advantage(drop_uniform_groups=True),
}


@preset
def near_ties(
    *,
    noise: float = 0.01,
    learning_rate: float = CONFIG.learning_rate,
    num_seeds: int = 10,
    updates: int = 200,
) -> Preset:
    """Five advantages on exact rewards, and on rewards with noise too small to matter."""
    return population(
        updates=updates,
        learning_rate=learning_rate,
        start=StartConfig(updates=110),
        log_every=20,
        variants=(
            Variant(label=f"{name}{suffix}", advantage=advantage, shaping=Shaping(noise=width))
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


@preset
def length_growth(
    *, learning_rate: float = 1e-3, num_seeds: int = 10, updates: int = 150
) -> Preset:
    """Four weights of a token by the length of its row, and four ways to keep answers short."""
    sums = Objective(aggregation="seq_mean_token_sum")
    norm = Objective(aggregation="seq_mean_token_sum_norm")
    return population(
        updates=updates,
        learning_rate=learning_rate,
        task=SortTask(num_digits=6, end_token=True, max_fillers=8),
        start=StartConfig(updates=90, fillers=(2, 4)),
        log_every=15,
        variants=(
            Variant(label="grpo"),
            Variant(label="token_mean", objective=Objective(aggregation="token_mean")),
            Variant(label="token_sum", objective=sums),
            Variant(label="dr_grpo", objective=norm, advantage=CENTRED),
            Variant(label="linear_price", shaping=Shaping(length="linear", weight=0.02)),
            Variant(label="relative_reward", shaping=Shaping(length="relative", weight=0.5)),
            Variant(
                label="soft_overlong", shaping=Shaping(length="soft_overlong", weight=0.5, buffer=6)
            ),
            Variant(label="stop_loops", sampler=Sampler(repeat_times=4)),
        ),
        seeds=fresh_seeds(1080, num_seeds),
        predictions=(
            "Wrong answers grow in no variant: a filler is one more place to go wrong.",
            "Wrong answers less right ones, in tokens, end higher with 1/|o| (grpo) than with "
            "token_mean, token_sum or dr_grpo.",
            "A price of 0.02 a token, and the relative length reward, lose the task: from this "
            "start most groups are all wrong, and then shortness is all that is rewarded.",
            "The soft overlong penalty and stopping at loops shorten answers and keep the task.",
        ),
    )


MARGINAL = Variant(label="marginal", advantage=Advantage(level="marginal"))
#: What a run begins with whose start is right once in thirty.
FROM_ONE_IN_THIRTY = {"start": StartConfig(updates=70), "learning_rate": 1e-3, "log_every": 20}


@preset
def process(*, num_seeds: int = 10, updates: int = 200) -> Preset:
    """Credit for a right outcome, for every right step, and for what a token adds to the score."""
    marginal = Advantage(level="marginal", baseline="group_centre")
    return population(
        **FROM_ONE_IN_THIRTY,
        updates=updates,
        variants=(
            Variant(label="outcome"),
            Variant(label="outcome_centre", advantage=CENTRED),
            Variant(label="process", advantage=Advantage(level="process")),
            MARGINAL,
            Variant(label="marginal_centre", advantage=marginal),
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


@preset
def process_graded(*, num_seeds: int = 10, updates: int = 200) -> Preset:
    """The same rewards, the outcome now the share of right positions: is it density or credit?"""
    return population(
        **FROM_ONE_IN_THIRTY,
        updates=updates,
        task=SortTask(reward="graded"),
        variants=(
            Variant(label="outcome"),
            Variant(label="outcome_centre", advantage=CENTRED),
            MARGINAL,
        ),
        seeds=fresh_seeds(1100, num_seeds),
        predictions=(
            "Marginal rewards do not read the outcome: the variant is that of the preset process, "
            "to the bit.",
            "A graded outcome ends no more accurate than an exact one: what the steps gain is "
            "their credit, not that partly right answers count.",
            "Marginal rewards end more accurate than the graded outcome, which they sum to.",
        ),
    )
