"""The initial policy of recorded runs, and their teachers, sampled on many prompts.

:mod:`analysis.studies.initial_policy` makes the tables.
"""

from __future__ import annotations

import pandas as pd

from analysis.records.manifests import RESULTS, recorded_table
from kl_term.plain_checks import check_choice

RECORDED = RESULTS / "untrained_cpu"
TABLE = "untrained.csv"
LENGTHS = RESULTS / "start_lengths_cpu"


def recorded(preset: str) -> pd.DataFrame:
    """Rows of :func:`analysis.studies.initial_policy.starts` of a preset, as recorded.

    Raises:
        ValueError: the table is damaged, or does not hold the preset.
    """
    table = _table()
    check_choice("preset", preset, table["preset"].unique())
    return table[table["preset"] == preset].drop(columns="preset").reset_index(drop=True)


def recorded_lengths() -> pd.DataFrame:
    """Rows of :func:`analysis.studies.initial_policy.lengths` as recorded."""
    return recorded_table(LENGTHS, "lengths.csv")


def presets_of_table() -> list[str]:
    """The presets whose initial policies are recorded."""
    return list(_table()["preset"].unique())


def _table() -> pd.DataFrame:
    return recorded_table(RECORDED, TABLE)
