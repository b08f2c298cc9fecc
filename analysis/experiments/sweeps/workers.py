"""Worker processes of a sweep: each takes shards one after another and says how it goes.

A worker may be killed at any instant: its claims end with it and what it stored stays. It ends by
itself when the process that started it is gone, at the latest after the update it is in.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

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

    exitcode: int


#: What a worker says; an outcome or a failure ends the shard.
Event = Said | Advanced | Outcome | Failed | Died


class Worker:
    """A process that computes one shard at a time."""

    def __init__(self, job: Job) -> None:
        self.connection, theirs = _context().Pipe()
        ends = (theirs, self.connection)
        self.process = _context().Process(target=_serve, args=(*ends, job), daemon=True)
        self.process.start()
        theirs.close()  # each side keeps its own end only, and so notices the other's death

    def start(self, shard: Shard) -> None:
        """Begin with a shard; a dead worker says so in :meth:`hear`."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(shard)

    def hear(self) -> Event:
        """The next event, waiting for it."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return Died(self.process.exitcode)

    def stop(self) -> None:
        """End it at once: there is nothing it could leave half done."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def _context() -> multiprocessing.context.BaseContext:
    """Processes forked from one that has imported everything and done nothing, where possible."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    return context


def _serve(connection: Connection, theirs: Connection, job: Job) -> None:
    theirs.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent acts
    torch.set_num_threads(THREADS)
    try:
        while True:
            shard = connection.recv()
            connection.send(_attempt(shard, job, connection))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone


def _attempt(shard: Shard, job: Job, connection: Connection) -> Outcome | Failed:
    try:
        outcome = complete(
            shard,
            job,
            say=lambda text: connection.send(Said(text)),
            advanced=lambda members, updates: connection.send(Advanced(members, updates)),
        )
    except (BrokenPipeError, ConnectionResetError):
        raise
    except (ValueError, OSError) as error:
        return Failed(str(error))
    if outcome is Outcome.BUSY:
        time.sleep(BUSY_SECONDS)
    return outcome
