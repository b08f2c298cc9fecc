"""Differences between the arms of a recorded population, as figures of a claim.

All are means over the seeds with the intervals of :mod:`analysis.experiments.statistics`: on the
tiny policy, at the settings of the preset, and no statement about any other.
"""

from __future__ import annotations

from functools import cache

import pandas as pd

from analysis.experiments.ablations import recording, summaries
from analysis.experiments.statistics import Interval


@cache
def recorded(preset: str) -> recording.Recorded:
    """The recording of a preset of the catalogue, read once."""
    return recording.load(recording.folder_of(preset))


def difference(
    finals: pd.DataFrame, arm: str, other: str, metric: str, *, beta: float | None = None
) -> Interval:
    """``arm`` minus ``other``, taken per seed: :func:`summaries.paired`."""
    return _only(summaries.paired(finals, [(arm, other, metric)], beta=beta))


def difference_along(
    finals: pd.DataFrame, arm: str, other: str, metric: str, *, of: str
) -> Interval:
    """``arm`` minus ``other`` at equal values of a metric: :func:`summaries.paired_along`."""
    return _only(summaries.paired_along(finals, [(arm, other)], of=of, metric=metric))


def _only(table: pd.DataFrame) -> Interval:
    return Interval(*table.loc[0, list(Interval._fields)])
