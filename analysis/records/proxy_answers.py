"""What a language model says that was trained on a reward model, as recorded.

:mod:`analysis.studies.language.proxy_answers` makes it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from analysis.records.manifests import RESULTS, recorded_table

RECORDED = RESULTS / "smollm2_proxy_answers_cpu"

#: The variant in whose rows the frozen model answers.
REFERENCE = "reference"


def recorded(folder: Path = RECORDED) -> pd.DataFrame:
    """A row per run and question: ``variant``, ``beta``, ``seed``, ``question``, ``answer``, did it
    end (``ended``), and its reward by the task (``gold``) and by the reward model (``proxy``).

    All runs answer with one noise, and so does the frozen model, in the rows of ``REFERENCE``.
    Answers are as they were said, white space and end included: see
    :func:`analysis.records.manifests.recorded_table`.
    """
    table = recorded_table(folder, "answers.csv")
    return table.assign(answer=table["answer"].map(json.loads))


def as_recorded(table: pd.DataFrame) -> pd.DataFrame:
    """The table of :func:`recorded` as it is written: answers in JSON, so that no reader takes
    ``007`` for a number or trims it."""
    return table.assign(answer=table["answer"].map(json.dumps))
