"""What a language model says that was trained on a reward model, as recorded.

:mod:`analysis.studies.language.proxy_answers` makes it.
"""

from __future__ import annotations

import pandas as pd

from analysis.records.manifests import RESULTS, recorded_table

RECORDED = RESULTS / "smollm2_proxy_answers_cpu"

#: The variant in whose rows the frozen model answers.
REFERENCE = "reference"


def recorded() -> pd.DataFrame:
    """A row per run and question: ``variant``, ``beta``, ``seed``, ``question``, ``answer``, did it
    end (``ended``), and its reward by the task (``gold``) and by the reward model (``proxy``).

    All runs answer with one noise, and so does the frozen model, in the rows of ``REFERENCE``; see
    :func:`analysis.records.manifests.recorded_table`.
    """
    return recorded_table(RECORDED, "answers.csv")
