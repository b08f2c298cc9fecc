"""What answers of a language model read like at so many nats from the reference, as recorded.

:mod:`analysis.studies.language.nats` makes it.
"""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from analysis.records.manifests import RESULTS, recorded_table

RECORDED = RESULTS / "smollm2_nats_cpu"


class Nats(NamedTuple):
    """The recorded tables."""

    #: A row per reading: ``update``, ``reverse_kl`` and ``forward_kl`` (nats per token, at the
    #: states of the policy's own answers), ``letters`` per word of them, which is
    #: what the run was rewarded for.
    path: pd.DataFrame
    #: A row per reading and question: ``update``, ``question``, ``answer``; the reference's are
    #: those of update 0. All readings draw with one noise.
    answers: pd.DataFrame


def recorded() -> Nats:
    """The recorded tables: see :func:`analysis.records.manifests.recorded_table`."""
    return Nats(*(recorded_table(RECORDED, f"{name}.csv") for name in Nats._fields))
