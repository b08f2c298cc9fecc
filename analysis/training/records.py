"""What a population leaves: its metrics, its failures, and the state from which it goes on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from analysis.training.config import Member, RunConfig


class Failure(NamedTuple):
    """A member that went NaN or infinite: it is frozen as it was before that optimizer step."""

    member: int  #: its place in the population
    update: int
    step: int  #: optimizer step within the update
    tensor: str  #: the first tensor, in order of computation, that was not finite


class RunRecord(NamedTuple):
    """What a run logged. W logging windows, M members."""

    config: RunConfig
    members: tuple[Member, ...]
    updates: np.ndarray  #: [W], the first update of each logging window
    metrics: dict[str, np.ndarray]  #: name in METRICS -> [W, M]; NaN once a member is frozen
    failures: tuple[Failure, ...]
    wall_seconds: float


class TrainerState(NamedTuple):
    """All that the rest of a run depends on; its randomness is keyed by seed and update."""

    update: int  #: updates done
    tensors: dict[str, Tensor]
    failures: tuple[Failure, ...]
    wall_seconds: float
