"""Where curves trained again depart from the recorded ones, and what that means."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from analysis.training.metrics import POLICY_METRICS

#: Of the largest recorded value of a member's metric. Sums taken in another order stay below it
#: until they flip a sampled token.
ROUNDING = 1e-3
#: The same of the policy at update 0 on another processor, whose rounding has trained another start
#: and another teacher: a KL between them was seen to change by 0.03.
TRAINED_ELSEWHERE = 0.1


def differing(both: pd.DataFrame) -> pd.DataFrame:
    """The numbers that differ at all, earliest first.

    Args:
        both: from :func:`analysis.experiments.ablations.recording.compared`.

    Returns:
        The rows of ``both`` whose numbers differ, with their ``size``: the difference over the
        metric's largest recorded value of that member, infinite where only one is a number.
    """
    member = both.groupby(["arm", "beta", "seed", "metric"], sort=False)["recorded"]
    largest = member.transform(lambda values: values.abs().max())
    with np.errstate(divide="ignore", invalid="ignore"):
        size = (both["difference"] / largest).fillna(math.inf)
    rows = both.assign(size=size)[both["recorded"] != both["again"]]
    return rows.sort_values("update", kind="stable").reset_index(drop=True)


def first_departure(rows: pd.DataFrame) -> str:
    """The first of :func:`differing`, in words; one beyond rounding where there is any."""
    parted = rows[rows["size"] > ROUNDING]
    kept = rows if parted.empty else parted
    earliest = kept[kept["update"] == kept["update"].iloc[0]]
    row = earliest.loc[earliest["size"].idxmax()]
    how = "differs in its last digits" if parted.empty else "is the first to part,"
    return (
        f"{row['arm']} beta={row['beta']:g} seed={row['seed']} {how} in the window from update "
        f"{row['update']} on: {row['metric']} {row['recorded']:.6g} recorded, "
        f"{row['again']:.6g} here, off by {row['difference']:.2g}"
    )


def meaning(rows: pd.DataFrame, recorded_on: str, here: str) -> str:
    """What the rows of :func:`differing` mean, as the end of a sentence about the recording.

    What is measured of the policy at update 0 can differ by rounding only, which on another machine
    has grown while the start was trained. Later it is the machine that tells whether rounding may
    be the reason.

    Args:
        rows: at least one.
        recorded_on: from :func:`place`, of the recording.
        here: the same of this machine.
    """
    allowed = ROUNDING if here == recorded_on else TRAINED_ELSEWHERE
    start = rows[(rows["update"] == 0) & (rows["size"] > allowed)]
    if start["metric"].isin(POLICY_METRICS).any():
        return (
            "differs already at update 0, by more than rounding: the code here computes something "
            "else"
        )
    if here == recorded_on:
        return (
            f"was recorded on such a machine with these versions ({here}): most likely the code "
            "here computes something else"
        )
    return (
        f"was recorded elsewhere ({recorded_on}; here {here}): sums differ in the last bit, so the "
        "start comes out slightly different, and from the first update at which that flips a "
        "sampled token the runs part"
    )


def place(stamp: dict[str, Any]) -> str:
    """Device and versions of a manifest or a stamp, in words."""
    versions = sorted(stamp["versions"].items())
    return ", ".join([stamp["device"], *(f"{name} {version}" for name, version in versions)])
