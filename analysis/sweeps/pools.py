"""Worker processes on this machine, each a pool of one: a kill takes no other worker with it.

A worker may be killed at any instant: its locks end with it and what it stored stays. It ends by
itself when the process that started it is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Protocol

import torch

from analysis.sweeps.progress import Progress
from analysis.sweeps.shard import THREADS
from analysis.sweeps.store import Shard
from kl_term.errors import UserError

#: ``complete_shard``, lacking the shard, the device and whom to tell.
Task = partial[bool]


class WorkerLost(Exception):
    """The worker is gone without having ended its shard; says how."""


class Pool(Protocol):
    """Workers, wherever they are."""

    @property
    def workers(self) -> int:
        """How many shards are computed at a time."""

    def submit(self, task: Task, number: int, shard: Shard) -> Future:
        """Let a worker begin with a shard, which is called by its number from then on."""

    def reports(self) -> list[tuple[int, str | int]]:
        """What the workers have reported since, each with the number of its shard."""

    def result(self, future: Future) -> bool:
        """Of a shard that has ended: whether it is finished.

        Raises:
            WorkerLost: its worker died.
        """

    def close(self) -> None:
        """End the workers at once; what is stored stays."""


class LocalPool:
    """Processes here; on GPUs each keeps to one of them, in turn."""

    def __init__(self, device: str = "cpu", workers: int = 1) -> None:
        if workers < 1:
            raise UserError(f"workers must be at least 1, not {workers}")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"device {device!r}: no GPU is visible here; use 'cpu'")
        self.devices = devices_of(device)
        self.workers = workers
        self._idle: list[_Worker] = []
        self._busy: dict[Future, _Worker] = {}

    def submit(self, task: Task, number: int, shard: Shard) -> Future:
        worker = self._idle.pop() if self._idle else _Worker(self._next_device())
        try:
            future = worker.executor.submit(_work, task, number, shard)
        except BrokenProcessPool as death:  # while it was idle
            future = Future()
            future.set_exception(death)
        self._busy[future] = worker
        return future

    def reports(self) -> list[tuple[int, str | int]]:
        found = []
        for worker in self._busy.values():
            while worker.reader.poll():
                found.append(worker.reader.recv())
        return found

    def result(self, future: Future) -> bool:
        worker = self._busy.pop(future)
        try:
            finished = future.result()
        except BrokenProcessPool:
            worker.close()
            raise WorkerLost("a kill or a crash") from None
        except (ValueError, OSError) as error:
            self._idle.append(worker)
            raise UserError(str(error)) from None
        self._idle.append(worker)
        return finished

    def close(self) -> None:
        for worker in [*self._busy.values(), *self._idle]:
            worker.close()
        self._busy.clear()
        self._idle.clear()

    def _next_device(self) -> str:
        busy = [worker.device for worker in self._busy.values()]
        return min(self.devices, key=busy.count)


def devices_of(device: str) -> list[str]:
    """``cuda`` is each GPU that is visible here; any other device is one."""
    if device != "cuda":
        return [device]
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


class _Worker:
    """A process that computes one shard at a time, and the pipe through which it reports.

    Each has a pipe of its own: on one that they shared, a killed worker would keep the lock.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.reader, writer = _context().Pipe(duplex=False)
        self.executor = ProcessPoolExecutor(1, _context(), _begin, (writer, device))

    def close(self) -> None:
        """End it at once: there is nothing it could leave half done."""
        for process in list((self.executor._processes or {}).values()):
            process.kill()  # Python 3.14 has kill_workers() for this
        self.executor.shutdown(wait=True, cancel_futures=True)
        self.reader.close()


def _context() -> multiprocessing.context.BaseContext:
    """Processes forked from one that has imported everything and done nothing, where possible."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    return context


_here: tuple[Connection, str]  #: of a worker: its end of the pipe, and its device


def _begin(writer: Connection, device: str) -> None:
    """In a worker, before its first shard."""
    global _here
    _here = writer, device
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent acts
    torch.set_num_threads(THREADS)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    wait([parent.sentinel])
    os._exit(1)


def _work(task: Task, number: int, shard: Shard) -> bool:
    writer, device = _here
    return task(shard, device, lambda report: writer.send((number, report)))


#: How often one shard may lose its worker.
MAX_DEATHS = 3


#: How often the sweep looks for news.
POLL_SECONDS = 0.2


def finish_shards(task: Task, shards: list[Shard], pool: Pool, progress: Progress) -> None:
    """Let the workers of a pool finish the shards; one whose worker died is tried again."""
    pending = deque(range(len(shards)))
    running: dict[Future, int] = {}
    deaths: Counter[int] = Counter()
    try:
        while pending or running:
            while pending and len(running) < pool.workers:
                number = pending.popleft()
                running[pool.submit(task, number, shards[number])] = number
            ended, _ = futures.wait(
                running, timeout=POLL_SECONDS, return_when=futures.FIRST_COMPLETED
            )
            for number, report in pool.reports():
                if isinstance(report, str):
                    progress.say(report)
                else:
                    progress.shard_at(number, report)
            for future in ended:
                number = running.pop(future)
                try:
                    if pool.result(future):
                        progress.shard_finished(number)
                    else:
                        pending.append(number)
                except WorkerLost as death:
                    deaths[number] += 1
                    progress.shard_lost(number)
                    _try_again(shards[number], deaths[number], death, progress)
                    pending.append(number)
    finally:
        pool.close()


def _try_again(shard: Shard, deaths: int, death: WorkerLost, progress: Progress) -> None:
    if deaths >= MAX_DEATHS:
        raise UserError(
            f"{len(shard.runs)} runs from {shard.runs[0].variant.name} on ended their worker "
            f"{deaths} times ({death}): give it more memory or fewer runs per shard"
        )
    progress.say(f"a worker ended by {death}; its {len(shard.runs)} runs are tried again")
