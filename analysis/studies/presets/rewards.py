"""The reward side: what a group's rewards are divided by, what length costs, who gets the credit.

Settings were found by search on seeds 0 to 2.
"""

from __future__ import annotations

from analysis.records.config import SortTask
from analysis.records.preset import Preset
from analysis.records.variants import Advantage, Objective, Sampler, Shaping, Variant
from analysis.studies.presets.designed import (
    AT_END_OF_TRAINING,
    EXTENDED,
    NUM_SEEDS,
    designed,
    on_ten_starts,
)
from analysis.studies.presets.parts import CENTRED, GROUP_STD
from analysis.studies.presets.registry import fresh_seeds, preset

#: How a group's rewards become advantages, by name.
ADVANTAGES = {
    "group_std": GROUP_STD,
    "std_min": Advantage(std_min=0.1),
    "group_centre": CENTRED,
    "leave_one_out": Advantage(baseline="leave_one_out"),
    "drop_uniform": Advantage(drop_uniform_groups=True),
}


@preset
def near_ties(*, noise: float = 0.01) -> Preset:
    """Five advantages on exact rewards, and on rewards with noise too small to matter."""
    return designed(
        _TIES,
        (
            Variant(label=f"{name}{suffix}", advantage=advantage, shaping=Shaping(noise=width))
            for suffix, width in (("", 0.0), ("_noisy", noise))
            for name, advantage in ADVANTAGES.items()
        ),
        fresh_seeds(8400, 20),
        updates=200,
        start={"updates": 110},
        log_every=20,
    )


_TIES = on_ten_starts(
    100,
    "Noise cost 0.16 with division by the standard deviation, nothing seen with a floor of 0.1 "
    "under it or without division; filtering equal groups did not help.",
    question="What does noise too small to matter cost, by how advantages are normalised?",
    predictions={
        "group_std_noisy < group_std: accuracy": "groups of noise get advantages of full size",
        "drop_uniform_noisy < drop_uniform: accuracy": "no two rewards are equal",
        "std_min_noisy = std_min: accuracy": "the floor keeps noise at its size",
        "group_centre_noisy = group_centre: accuracy": "nothing is divided",
        "leave_one_out_noisy = leave_one_out: accuracy": "nothing is divided",
        "std_min group_centre leave_one_out drop_uniform = group_std: accuracy": (
            "without noise they see the same signal"
        ),
        "std_min_noisy > group_std_noisy: accuracy": "the floor keeps noise at its size",
    },
)


@preset
def length_growth() -> Preset:
    """Four weights of a token by the length of its row, and four ways to keep answers short."""
    sums = Objective(aggregation="seq_mean_token_sum")
    norm = Objective(aggregation="seq_mean_token_sum_norm")
    return designed(
        _LENGTHS,
        (
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
        fresh_seeds(8500, NUM_SEEDS),
        updates=150,
        learning_rate=1e-3,
        task=SortTask(num_digits=6, end_token=True, max_fillers=8),
        start={"updates": 90, "fillers": (2, 4)},
        log_every=15,
    )


_LENGTHS = on_ten_starts(
    80,
    "Wrong answers less right ones ended 0.12 to 0.16 tokens higher with 1/|o| than with the other "
    "weights. The price and the relative reward lost the task; the soft overlong penalty "
    "and stopping loops shortened answers by 0.26 and 0.17 tokens.",
    stopping=EXTENDED,
    question="Does 1/|o| make wrong answers longer than right ones, and what keeps answers short?",
    outcome=f"Length in tokens; excess: wrong answers less right ones. {AT_END_OF_TRAINING}",
    predictions={
        **{
            f"grpo > {other}: excess": "of an answer of negative advantage it moves 1/|o| down"
            for other in ("token_mean", "token_sum", "dr_grpo")
        },
        "grpo > token_sum: wrong_length": "it moves 1/|o| of wrong answers down",
        "linear_price relative_reward < grpo: accuracy": (
            "where a whole group is wrong, shortness is all that is rewarded"
        ),
        "linear_price relative_reward soft_overlong stop_loops < grpo: length": "they shorten",
        "soft_overlong stop_loops = grpo: accuracy": "they act near the limit only",
    },
)


MARGINAL = Variant(label="marginal", advantage=Advantage(level="marginal"))
#: What a run begins with whose start is right once in thirty.
FROM_ONE_IN_THIRTY = {"start": {"updates": 70}, "learning_rate": 1e-3, "log_every": 20}


@preset
def process() -> Preset:
    """Credit for a right outcome, for every right step, and for what a token adds to the score."""
    marginal = Advantage(level="marginal", baseline="group_centre")
    return designed(
        _PROCESS,
        (
            Variant(label="outcome"),
            Variant(label="outcome_centre", advantage=CENTRED),
            Variant(label="process", advantage=Advantage(level="process")),
            MARGINAL,
            Variant(label="marginal_centre", advantage=marginal),
        ),
        fresh_seeds(8600, NUM_SEEDS),
        **FROM_ONE_IN_THIRTY,
        updates=200,
    )


_PROCESS = on_ten_starts(
    50,
    "Against the outcome, averaged over training: process +0.017, marginal +0.017; at the end "
    "+0.030 and +0.036. Dividing by the standard deviation made no difference to marginal.",
    stopping=EXTENDED,
    question="Is credit for right steps, from a perfect verifier, worth having?",
    outcome=f"Accuracy, at the end and averaged over training. {AT_END_OF_TRAINING}",
    predictions={
        "process marginal > outcome: average": "a step is credited with what it did",
        "process marginal > outcome: accuracy": "a step is credited with what it did",
        "marginal_centre > outcome_centre: average": "the same without division",
        "marginal = marginal_centre: average": "the optimizer takes out scale",
    },
)


@preset
def process_graded() -> Preset:
    """The same rewards, the outcome now the share of right positions: is it density or credit?"""
    return designed(
        _GRADED,
        (
            Variant(label="outcome"),
            Variant(label="outcome_centre", advantage=CENTRED),
            MARGINAL,
        ),
        process().seeds,
        **FROM_ONE_IN_THIRTY,
        updates=200,
        task=SortTask(reward="graded"),
    )


_GRADED = on_ten_starts(
    30,
    "A graded outcome trained as an exact one; marginal rewards, whose sum it is, +0.019 averaged "
    "over training.",
    stopping=EXTENDED,
    question="Is it the density of step rewards or their credit?",
    outcome=f"Accuracy, at the end and averaged over training. {AT_END_OF_TRAINING}",
    predictions={
        "marginal > outcome: average": "their sum is the outcome: what differs is the credit",
        "marginal > outcome: accuracy": "their sum is the outcome: what differs is the credit",
    },
)
