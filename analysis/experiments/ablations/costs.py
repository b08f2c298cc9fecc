"""What a threshold costs: updates, tokens and operations until a population first reaches it.

Operations are counted from the configuration (:mod:`analysis.experiments.benchmark.counting`), not
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
from analysis.experiments.ablations.presets import Preset
from analysis.experiments.benchmark.counting import forward_flops, generated_tokens
from analysis.training.arms import Arm
from analysis.training.config import TrainConfig

UNITS = ("updates", "tokens", "flops")


class Cost(NamedTuple):
    """Of one update of one member."""

    tokens: int  #: sampled, by whoever samples
    flops: int


class Ratio(NamedTuple):
    """How many times the cost of another arm: a geometric mean over seeds, and its interval."""

    mean: float
    low: float  #: zero if the other arm missed in a seed: its own ratio is an upper bound
    high: float  #: infinite if the arm did: a lower bound
    missed: int  #: seeds in which the arm never got there
    other_missed: int  #: seeds in which the other arm did not
    seeds: int


def update_cost(config: TrainConfig, arm: Arm) -> Cost:
    """Of an update with one optimizer step.

    Raises:
        ValueError: the arm needs a teacher and ``config`` has none, or updates have several steps.
    """
    if config.num_iterations * config.num_minibatches != 1:
        raise ValueError("update_cost counts one optimizer step an update: num_iterations=1")
    taught = arm.distillation is not None or arm.sampler.by == "teacher"
    if taught and config.teacher is None:
        raise ValueError(f"arm {arm.name!r} needs a teacher: set teacher in the config")
    samples_apart = arm.sampler.foreign and arm.sampler.by == "policy"
    reads_reference = arm.kl.estimator != "none" or arm.objective.kind == "dpo"
    flops = (3 + samples_apart + reads_reference) * forward_flops(config)
    if taught:
        flops += forward_flops(_of_teacher(config))
    return Cost(generated_tokens(config), flops)


def crossings(curves: pd.DataFrame, preset: Preset, metric: str, threshold: float) -> pd.DataFrame:
    """What each member spent until a metric first reached a threshold.

    Between the middles of two logging windows the metric is taken to be a straight line.

    Returns:
        One row per member: ``arm``, ``seed``, ``updates``, ``tokens``, ``flops``, and ``reached``;
        where it is False they are those of the whole run, a lower bound.
    """
    config, costs = preset.config, {}
    for arm in preset.arms:
        costs[arm.name] = update_cost(config, arm)
    rows = []
    for (arm, seed), member in curves.groupby(["arm", "seed"], sort=False):
        middles = member["update"].to_numpy() + config.log_every / 2
        at = first_crossing(middles, member[metric].to_numpy(), threshold)
        reached = bool(np.isfinite(at))
        updates = at if reached else float(config.updates)
        spent = {"updates": updates, **{k: updates * v for k, v in costs[arm]._asdict().items()}}
        rows.append({"arm": arm, "seed": seed, **spent, "reached": reached})
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


def cost_ratio(spent: pd.DataFrame, arm: str, other: str, unit: str) -> Ratio:
    """How many times more ``arm`` spent than ``other``, seed by seed.

    The interval is that of the mean logarithm. Who never got there is charged with the whole run,
    and the interval is open on the side on which its cost is not known.

    Raises:
        ValueError: an unknown arm or unit.
    """
    if unit not in UNITS:
        raise ValueError(f"unit must be one of {list(UNITS)}, got {unit!r}")
    sides = []
    for name in (arm, other):
        rows = spent[spent["arm"] == name].set_index("seed")
        if rows.empty:
            raise ValueError(f"no arm {name!r} among {sorted(set(spent['arm']))}")
        sides.append(rows)
    logs = np.log((sides[0][unit] / sides[1][unit]).to_numpy())
    mean, low, high = (float(np.exp(value)) for value in statistics.interval(logs))
    missed, other_missed = (int((~side["reached"]).sum()) for side in sides)
    low, high = 0.0 if other_missed else low, float("inf") if missed else high
    return Ratio(mean, low, high, missed, other_missed, len(logs))


def _of_teacher(config: TrainConfig) -> TrainConfig:
    return config.model_copy(update={"policy": config.teacher.policy or config.policy})
