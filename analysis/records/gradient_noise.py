"""How noisy an update's KL gradient is along a trained run, as recorded.

:mod:`analysis.studies.gradient_noise` makes it.
"""

from __future__ import annotations

import pandas as pd

from analysis.records.manifests import RESULTS, recorded_table

RECORDED = RESULTS / "gradient_noise_cpu"
TABLE = "noise.csv"
#: That are sampled at a checkpoint for each term.
BATCHES = 1000


def recorded() -> pd.DataFrame:
    """Rows of :func:`analysis.studies.gradient_noise.along_run` as recorded."""
    return recorded_table(RECORDED, TABLE)
