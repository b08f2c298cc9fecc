"""Recorded runs as the book reads them, and the difference of two variants.

:func:`difference` is a mean over the starts, or over the seeds of one start, with the interval of
:mod:`analysis.records.statistics`, at the settings of the preset, and no statement about any other.
"""

from __future__ import annotations

from functools import cache

import pandas as pd

from analysis.records import recording, summaries
from analysis.records.statistics import Interval


@cache
def recorded_runs(preset: str) -> recording.Recording:
    """The recording of a preset of the catalogue, and what it is compared with, read once."""
    return recording.with_others(recording.load(recording.folder_of(preset)))


@cache
def recorded(preset: str) -> recording.Recording:
    """The same with one row a start where there are several: they are what is independent."""
    return recording.by_start(recorded_runs(preset))


def difference(
    finals: pd.DataFrame, variant: str, other: str, metric: str, *, beta: float | None = None
) -> Interval:
    """``variant`` minus ``other``, taken per seed: ``summaries.paired``."""
    table = summaries.paired(finals, [(variant, other, metric)], beta=beta)
    return Interval(*table.loc[0, list(Interval._fields)])
