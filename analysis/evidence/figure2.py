"""Figure 2 of "Rethinking KL Divergence in RLHF" (Liu et al., 2025), at equal KL."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd

from analysis.evidence.predictions import JUMPS
from analysis.evidence.recorded import recorded_runs
from analysis.records import designs
from analysis.records.summaries import fluctuation
from analysis.studies.presets.designed import FIGURE2


@cache
def figure2() -> pd.DataFrame:
    """Figure 2 at equal KL: the predictions of its design, of fluctuations in place of rewards."""
    run = recorded_runs("equal_kl")
    keys = ["variant", "beta", "seed"]
    metrics = [prediction.metric for prediction in FIGURE2.predictions]
    jumps = np.log(fluctuation(run.curves, metrics).set_index(keys)[metrics]).add_prefix(JUMPS)
    finals = run.finals.join(jumps, on=keys)
    rows = []
    for prediction in FIGURE2.predictions:
        read = prediction.model_copy(update={"metric": f"{JUMPS}{prediction.metric}"})
        rows.append(designs.judged(finals, read, FIGURE2, designs.starts_of(run.preset)))
    return pd.DataFrame(rows)
