"""How noisy the prefix loss of a trained policy is by its control variate, as recorded.

:mod:`analysis.studies.control_noise` makes it.
"""

from __future__ import annotations

import pandas as pd

from analysis.records.manifests import RESULTS, recorded_table

RECORDED = RESULTS / "control_noise_cpu"
TABLE = "noise.csv"
#: That are drawn at a checkpoint for each age of the samples.
BATCHES = 20
#: Batches that one weight is fitted on.
FIT = 10


def recorded() -> pd.DataFrame:
    """Rows of :func:`analysis.studies.control_noise.along_run` as recorded."""
    return recorded_table(RECORDED, TABLE)
