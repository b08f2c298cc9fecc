"""What the runs of a population logged while they were trained."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from analysis.records.config import Run, RunConfig


class Failure(NamedTuple):
    """A run that went NaN or infinite: it is frozen as it was before that optimizer step."""

    run: int  #: its place in the population
    update: int
    step: int  #: optimizer step within the update
    tensor: str  #: the first tensor, in order of computation, that was not finite


class RunRecord(NamedTuple):
    """What a run logged. W logging windows, M runs."""

    config: RunConfig
    runs: tuple[Run, ...]
    updates: np.ndarray  #: [W], the first update of each logging window
    metrics: dict[str, np.ndarray]  #: name in config.logs -> [W, M]; NaN once a run is frozen
    failures: tuple[Failure, ...]
    wall_seconds: float
    #: Name in FINAL_METRICS -> [M]; empty before the last update, and where none are asked for.
    final: dict[str, np.ndarray]
