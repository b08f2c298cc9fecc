"""Who computes the shards of a sweep: what the sweep asks of them, and what it hears.

A crew takes one shard for each of its workers and reports events; a worker that is lost is replaced
by the crew, and its shard is the sweep's to give out again. Where the workers are, in processes of
this machine or on a cluster, is the crew's own business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from analysis.experiments.ablations.settings import PopulationConfig
from analysis.experiments.sweeps.shards import Job, Outcome, Shard, complete

#: Of each worker: sums in another order end in other digits, and idle threads that spin cost much.
THREADS = 1
#: Before a shard that another process computes is tried again.
BUSY_SECONDS = 0.2


class Said(NamedTuple):
    """Something to be told to the user."""

    text: str


class Advanced(NamedTuple):
    """Members in training, and how many of their updates are done."""

    members: int
    updates: int


class Failed(NamedTuple):
    """Why the sweep cannot go on, such as a full disk or a model that cannot be had."""

    reason: str


class Died(NamedTuple):
    """The worker is gone without having ended its shard."""

    how: str  #: such as ``signal 9``


#: What a crew reports; all but the first two end the shard.
Event = Said | Advanced | Outcome | Failed | Died


class Order(NamedTuple):
    """What a crew is for."""

    store: Path
    config: PopulationConfig
    source: str  #: hash of the source under which members are to be computed
    checkpoint_every: int
    shards: int
    graphs: bool = False  #: see :mod:`analysis.training.graphs`


class Crew(Protocol):
    """Workers, each with a shard or without."""

    @property
    def idle(self) -> int:
        """How many could take a shard."""

    @property
    def busy(self) -> int:
        """How many have one."""

    def start(self, number: int, shard: Shard) -> None:
        """Let an idle worker begin with a shard, which is called by its number from then on."""

    def hear(self) -> Sequence[tuple[int, Event]]:
        """At least one event of the shards in work, waiting for it."""

    def stop(self) -> None:
        """End them all at once; what is stored stays."""


class Place(Protocol):
    """Where a crew can be had."""

    @property
    def workers(self) -> int:
        """How many shards are computed at a time."""

    def crew(self, order: Order) -> Crew:
        """Workers for a sweep, no more than it has shards."""


def attempt(shard: Shard, job: Job, tell: Callable[[Event], None]) -> Outcome | Failed:
    """Complete a shard; what the user can mend is a failure, not an exception."""
    try:
        return complete(
            shard,
            job,
            say=lambda text: tell(Said(text)),
            advanced=lambda members, updates: tell(Advanced(members, updates)),
        )
    except (BrokenPipeError, ConnectionResetError):
        raise  # nobody listens any more
    except (ValueError, OSError) as error:
        return Failed(str(error))
    except RuntimeError as error:
        if not job.graphs:
            raise
        reason = str(error).strip().partition("\n")[0]
        return Failed(f"with CUDA graphs: {reason}; go on without --graphs, what is stored stays")
