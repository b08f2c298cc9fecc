"""What a threshold costs: updates, tokens and operations until a population first reaches it.

Operations are counted from the configuration (:mod:`analysis.training.counting`), not
timed: two a weight and token in each pass. A forward pass of the policy is one pass, its backward
pass two; sampling yields the activations of the gradient. A teacher or a reference that is asked
for log-probs adds a pass of its own size. Supervised training is charged for the teacher's samples,
which are fresh in every update here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.experiments import statistics
from analysis.experiments.preset import Preset
from analysis.training.config import TrainConfig
from analysis.training.counting import forward_flops, generated_tokens
from analysis.training.variants import Variant

UNITS = ("updates", "tokens", "flops")


class Cost(NamedTuple):
    """Of one update of one run."""

    tokens: int  #: sampled, by whoever samples
    flops: int


class Ratio(NamedTuple):
    """How many times the cost of another variant: a geometric mean over seeds, and its interval."""

    mean: float
    low: float  #: zero if the other variant missed in a seed: its own ratio is an upper bound
    high: float  #: infinite if the variant did: a lower bound
    missed: int  #: seeds in which the variant never got there
    other_missed: int  #: seeds in which the other variant did not
    seeds: int


def update_cost(config: TrainConfig, variant: Variant) -> Cost:
    """Of an update with one optimizer step.

    Raises:
        ValueError: the variant needs a teacher and ``config`` has none, or updates have several
            steps.
    """
    if config.num_iterations * config.num_minibatches != 1:
        raise ValueError("update_cost counts one optimizer step an update: num_iterations=1")
    taught = variant.distillation is not None or variant.sampler.by == "teacher"
    if taught and config.teacher is None:
        raise ValueError(f"variant {variant.name!r} needs a teacher: set teacher in the config")
    samples_apart = variant.sampler.off_policy and variant.sampler.by == "policy"
    reads_reference = variant.kl.estimator != "none" or variant.objective.kind == "dpo"
    flops = (3 + samples_apart + reads_reference) * forward_flops(config)
    if taught:
        flops += forward_flops(_of_teacher(config))
    return Cost(generated_tokens(config), flops)


def crossings(curves: pd.DataFrame, preset: Preset, metric: str, threshold: float) -> pd.DataFrame:
    """What each run spent until a metric first reached a threshold.

    Between the middles of two logging windows the metric is taken to be a straight line.

    Returns:
        One row per run: ``variant``, ``seed``, ``updates``, ``tokens``, ``flops``, and ``reached``;
        where it is False they are those of the whole run, a lower bound.
    """
    config, costs = preset.config, {}
    for variant in preset.variants:
        costs[variant.name] = update_cost(config, variant)
    rows = []
    for (variant, seed), run in curves.groupby(["variant", "seed"], sort=False):
        middles = run["update"].to_numpy() + config.log_every / 2
        at = first_crossing(middles, run[metric].to_numpy(), threshold)
        reached = bool(np.isfinite(at))
        updates = at if reached else float(config.updates)
        spent = {
            "updates": updates,
            **{k: updates * v for k, v in costs[variant]._asdict().items()},
        }
        rows.append({"variant": variant, "seed": seed, **spent, "reached": reached})
    return pd.DataFrame(rows)


def first_crossing(places: np.ndarray, values: np.ndarray, threshold: float) -> float:
    """Where a broken line first reaches a threshold; infinite if it does not."""
    above = np.flatnonzero(values >= threshold)
    if not above.size:
        return float("inf")
    right = above[0]
    if right == 0:
        return float(places[0])
    low, high = values[right - 1], values[right]
    share = (threshold - low) / (high - low)
    return float(places[right - 1] + share * (places[right] - places[right - 1]))


def cost_ratio(spent: pd.DataFrame, variant: str, other: str, unit: str) -> Ratio:
    """How many times more ``variant`` spent than ``other``, seed by seed.

    The interval is that of the mean logarithm. Who never got there is charged with the whole run,
    and the interval is open on the side on which its cost is not known.

    Raises:
        ValueError: an unknown variant or unit.
    """
    if unit not in UNITS:
        raise ValueError(f"unit must be one of {list(UNITS)}, got {unit!r}")
    sides = []
    for name in (variant, other):
        rows = spent[spent["variant"] == name].set_index("seed")
        if rows.empty:
            raise ValueError(f"no variant {name!r} among {sorted(set(spent['variant']))}")
        sides.append(rows)
    logs = np.log((sides[0][unit] / sides[1][unit]).to_numpy())
    mean, low, high = (float(np.exp(value)) for value in statistics.interval(logs))
    missed, other_missed = (int((~side["reached"]).sum()) for side in sides)
    low, high = 0.0 if other_missed else low, float("inf") if missed else high
    return Ratio(mean, low, high, missed, other_missed, len(logs))


def _of_teacher(config: TrainConfig) -> TrainConfig:
    return config.model_copy(update={"policy": config.teacher.policy or config.policy})
