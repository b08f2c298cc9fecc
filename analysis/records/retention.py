"""What a policy trained on one task still is elsewhere, as recorded.

:mod:`analysis.studies.language.retention` makes it.
"""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from analysis.records.manifests import RESULTS, recorded_table

RECORDED = RESULTS / "smollm2_kept_cpu"
#: Written before any run was read.
PREDICTIONS = (
    "Without a KL term the policy leaves the reference at states of the other skills too.",
    "The less a skill is like the task, the less: the task, products, capitals and opposites, "
    "instructions.",
    "A KL term on the task restrains elsewhere too: each variant that restrains keeps the policy "
    "nearer to the reference on every skill than no KL term.",
    "At equal reverse KL on the task, k3 as a loss keeps more of what the reference says than the "
    "exact KL: what it descends is the forward KL.",
    "The probability of a right capital or opposite falls by less than 0.05 in every variant.",
)


class Retention(NamedTuple):
    """The recorded tables."""

    runs: pd.DataFrame  #: one row per run and skill
    reference: pd.DataFrame  #: one row per skill


def recorded() -> Retention:
    """The recorded tables: see :func:`analysis.records.recording.recorded_table`."""
    return Retention(*(recorded_table(RECORDED, f"{name}.csv") for name in ("kept", "reference")))
