"""Worker processes on this machine: each takes shards one after another and says how it goes.

A worker may be killed at any instant: its claims end with it and what it stored stays. It ends by
itself when the process that started it is gone, at the latest after the update it is in.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

import torch

from analysis.errors import Refused
from analysis.experiments.ablations.stamp import stamp_here
from analysis.experiments.sweeps.crew import (
    BUSY_SECONDS,
    THREADS,
    Died,
    Event,
    Order,
    attempt,
)
from analysis.experiments.sweeps.shards import Job, Outcome, Shard


class ThisMachine:
    """Processes here; on GPUs each keeps to one of them, in turn.

    Raises:
        Refused: there is no such device, or ``workers`` is not positive.
    """

    def __init__(self, device: str = "cpu", workers: int = 1) -> None:
        if workers < 1:
            raise Refused(f"workers must be at least 1, not {workers}")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise Refused(f"device {device!r}: no GPU is visible here; use 'cpu'")
        self.devices = devices_of(device)
        self.workers = workers

    def crew(self, order: Order) -> LocalCrew:
        count = min(self.workers, order.shards)
        devices = [self.devices[n % len(self.devices)] for n in range(count)]
        stamps = {device: stamp_here(order.source, device, THREADS) for device in devices}
        common = (order.checkpoint_every, order.graphs)
        return LocalCrew([Job(order.store, stamps[d], d, *common) for d in devices])


def devices_of(device: str) -> list[str]:
    """``cuda`` is each GPU that is visible here; any other device is one."""
    if device != "cuda":
        return [device]
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


class LocalCrew:
    """A process for each of ``jobs``."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._idle = [Worker(job) for job in jobs]
        self._busy: dict[Worker, int] = {}

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def busy(self) -> int:
        return len(self._busy)

    def start(self, number: int, shard: Shard) -> None:
        worker = self._idle.pop()
        self._busy[worker] = number
        worker.start(shard)

    def hear(self) -> list[tuple[int, Event]]:
        ready = wait([worker.connection for worker in self._busy])
        heard: list[tuple[int, Event]] = []
        for worker in [worker for worker in self._busy if worker.connection in ready]:
            event = worker.hear()
            heard.append((self._busy[worker], event))
            match event:
                case Outcome():
                    del self._busy[worker]
                    self._idle.append(worker)
                case Died():
                    del self._busy[worker]
                    self._idle.append(Worker(worker.job))
        return heard

    def stop(self) -> None:
        for worker in [*self._idle, *self._busy]:
            worker.stop()


class Worker:
    """A process that computes one shard at a time."""

    def __init__(self, job: Job) -> None:
        self.job = job
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
            code = self.process.exitcode
            return Died(f"signal {-code}" if code < 0 else f"exit status {code}")

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
    if job.device.startswith("cuda"):
        torch.cuda.set_device(job.device)
    try:
        while True:
            shard = connection.recv()
            outcome = attempt(shard, job, connection.send)
            if outcome is Outcome.BUSY:
                time.sleep(BUSY_SECONDS)
            connection.send(outcome)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone
