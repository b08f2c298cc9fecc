"""Differences between the arms of a recorded population, as figures of a claim.

All are interquartile means over the seeds with 95% bootstrap bands: on the tiny policy, at the
settings of the preset, and no statement about any other.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pandas as pd

from analysis.experiments.ablations import recording, summaries


class Band(NamedTuple):
    """A difference over seeds."""

    iqm: float
    low: float
    high: float

    @property
    def above(self) -> bool:
        """Is zero below the whole band?"""
        return self.low > 0.0

    @property
    def below(self) -> bool:
        """Is zero above the whole band?"""
        return self.high < 0.0

    def figures(self, name: str) -> dict[str, float]:
        """The three numbers, named."""
        return {name: self.iqm, f"{name}_low": self.low, f"{name}_high": self.high}


@cache
def recorded(preset: str) -> recording.Recorded:
    """The recording of a preset of the catalogue, read once."""
    return recording.load(recording.folder_of(preset))


def difference(
    finals: pd.DataFrame, arm: str, other: str, metric: str, *, beta: float | None = None
) -> Band:
    """``arm`` minus ``other``, taken per seed: :func:`summaries.paired`."""
    (row,) = summaries.paired(finals, [(arm, other, metric)], beta=beta).to_dict("records")
    return Band(row["iqm"], row["low"], row["high"])


def difference_at_equal(
    finals: pd.DataFrame, arm: str, other: str, metric: str, *, of: str, level: float
) -> Band:
    """``arm`` minus ``other`` where both have the same level of a metric, read off along beta.

    Raises:
        ValueError: too few seeds reach the level for a band.
    """
    table = summaries.paired_at_equal(finals, [(arm, other)], [level], of=of, metric=metric)
    (row,) = table.to_dict("records")
    if row["seeds"] < summaries.MIN_SEEDS:
        raise ValueError(f"{arm} and {other} both reach {of}={level:g} in {row['seeds']} seeds")
    return Band(row["iqm"], row["low"], row["high"])
