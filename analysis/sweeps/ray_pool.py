"""Workers on a Ray cluster: one shard a task, nothing shared but the cluster.

The sweep's own process locks the runs and is the only one that touches the store. A task trains in
a folder of its own and sends its checkpoints through a queue and its finished runs at the end, as
the bytes of their files; when it is lost, the next one is given the last checkpoints. So a store
filled by a cluster is the store a single machine would have filled, and either goes on where the
other stopped. This package is sent along, so that every machine computes under the source that
started the sweep; the cluster's Python needs what training needs, and filelock.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import platform
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

import analysis
import kl_term
from analysis.sweeps.checkpoints import Checkpoints
from analysis.sweeps.pools import Task, WorkerLost
from analysis.sweeps.provenance import source_of
from analysis.sweeps.shard import BUSY_SECONDS, THREADS
from analysis.sweeps.store import Shard, Store, StoredRun, without_checksum
from analysis.training.pretrained.folders import needed
from kl_term.errors import UserError

#: To answer at all, and to be ready.
ANSWER_SECONDS = 5.0
CONNECT_SECONDS = 60.0
#: How often a task tells how far it is.
TELL_SECONDS = 0.5
#: On the head node, without which there is no cluster; begun again, empty, should it be killed.
QUEUE = {
    "num_cpus": 0,
    "resources": {"node:__internal_head__": 0.001},
    "max_restarts": -1,
    "max_task_retries": -1,
}
#: What Ray raises when a worker is gone, and how the user is told.
DEATHS = {
    "WorkerCrashedError": "a crash or a kill",
    "OutOfMemoryError": "lack of memory",
    "NodeDiedError": "the loss of its node",
    "LocalRayletDiedError": "the loss of its node",
    "ObjectLostError": "the loss of its node",
}


class _Running(NamedTuple):
    """A task, as the sweep sees it."""

    number: int
    reference: Any
    lock: ExitStack
    store: Store
    checkpoints: Checkpoints


class RayPool:
    """Tasks on a cluster: see :func:`ray_pool`."""

    def __init__(
        self, ray: ModuleType, device: str, resources: dict[str, float], workers: int
    ) -> None:
        self.device, self.resources, self.workers = device, resources, workers
        self._ray = ray
        self._running: dict[Future, _Running] = {}
        self._queue: Any = None
        self._said: list[tuple[int, str | int]] = []

    def submit(self, task: Task, number: int, shard: Shard) -> Future:
        options = task.keywords
        store, source = Store(options["folder"]), options["source"]
        with ExitStack() as lock:
            if not lock.enter_context(store.lock(shard)):
                time.sleep(BUSY_SECONDS)
                return _done(False)
            missing = store.missing(shard, source, lambda text: self._said.append((number, text)))
            if not missing:
                return _done(True)
            part = shard.model_copy(update={"runs": missing})
            checkpoints = Checkpoints(store.checkpoints, part)
            kept = {path.name: path.read_bytes() for path in checkpoints.paths()}
            with self._ray_errors():
                if self._queue is None:
                    queues = importlib.import_module("ray.util.queue")
                    self._queue = queues.Queue(actor_options=QUEUE)
                train = self._ray.remote(
                    num_cpus=self.resources["CPU"],
                    num_gpus=self.resources.get("GPU", 0.0),
                    max_retries=0,
                )(train_shard)
                reference = train.remote(task, number, part, self.device, self._queue, kept)
                future = reference.future()
            running = _Running(number, reference, lock.pop_all(), store, checkpoints)
            self._running[future] = running
            return future

    def reports(self) -> list[tuple[int, str | int]]:
        found, self._said = self._said, []
        if self._queue is None:
            return found
        with self._ray_errors():
            letters = self._queue.get_nowait_batch(self._queue.qsize())
        by_number = {running.number: running for running in self._running.values()}
        for number, report in letters:
            if number not in by_number:
                continue  # of a task that is over by now
            if isinstance(report, tuple):
                by_number[number].checkpoints.write(*report)
            else:
                found.append((number, report))
        return found

    def result(self, future: Future) -> bool:
        if future not in self._running:
            return future.result()
        running = self._running.pop(future)
        with running.lock:
            try:
                files = future.result()
            except self._ray.exceptions.RayError as error:
                for kind in type(error).__mro__:
                    if kind.__name__ in DEATHS:
                        raise WorkerLost(DEATHS[kind.__name__]) from None
                if isinstance(cause := getattr(error, "cause", None), (ValueError, OSError)):
                    raise UserError(str(cause)) from None
                raise UserError(f"a task on the Ray cluster failed: {first_line(error)}") from None
            for data in files:
                running.store.write(without_checksum(data, StoredRun))
            running.checkpoints.discard()
            return True

    def close(self) -> None:
        for running in self._running.values():
            running.lock.close()
            self._ray.cancel(running.reference, force=True)
        self._running.clear()
        if self._queue is not None:
            self._queue.shutdown(force=True)
            self._queue = None

    @contextmanager
    def _ray_errors(self) -> Iterator[None]:
        """A lost cluster is refused; what a signal handler raises comes as it was raised."""
        try:
            yield
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise UserError(
                f"the Ray cluster is lost ({first_line(error)}): what is stored stays; "
                "run the sweep again"
            ) from None
        except SystemError as error:
            raise error.__cause__ or error from None


def train_shard(
    task: Task, number: int, shard: Shard, device: str, queue: Any, kept: dict[str, bytes]
) -> list[bytes]:
    """A task: complete a shard in a folder of its own, from the checkpoints ``kept``, if any.

    Returns:
        The files of its runs.
    """
    torch.set_num_threads(THREADS)
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{platform.node()}: torch sees no GPU there")
    if source_of(shard.config) != task.keywords["source"]:
        raise UserError(f"{platform.node()}: the source changed since the sweep began")
    with tempfile.TemporaryDirectory(prefix="kl-term-") as folder:
        store = Store(Path(folder))
        checkpoints = Checkpoints(store.checkpoints, shard)
        for name in sorted(kept):
            checkpoints.write(name, kept[name])
        sent, told = checkpoints.paths()[:1], -math.inf
        whole = len(shard.runs) * shard.config.updates

        def report(news: str | int) -> None:
            nonlocal sent, told
            newest = checkpoints.paths()[:1]
            if newest and newest != sent:
                queue.put((number, (newest[0].name, newest[0].read_bytes())))
            sent = newest
            if isinstance(news, str) or news == whole or time.monotonic() > told + TELL_SECONDS:
                told = told if isinstance(news, str) else time.monotonic()
                queue.put((number, news))

        partial(task.func, **task.keywords | {"folder": store.root})(shard, device, report)
        return list(store.contents().values())


def shard_resources(device: str, gpus_per_shard: float | None) -> dict[str, float]:
    """What one shard occupies: a core, and on cuda a GPU or a share of one."""
    if device == "cpu":
        if gpus_per_shard:
            raise UserError("gpus_per_shard is for device 'cuda'")
        return {"CPU": 1.0}
    share = 1.0 if gpus_per_shard is None else gpus_per_shard
    if not 0.0 < share <= 1.0:
        raise UserError(f"gpus_per_shard must be above 0 and at most 1, not {share:g}")
    return {"CPU": 1.0, "GPU": share}


def room_for(resources: Mapping[str, float], nodes: list[Mapping[str, float]]) -> int:
    """How many shards of these resources fit on all nodes together, none on two."""
    return sum(
        min(math.floor(node.get(name, 0.0) / amount) for name, amount in resources.items())
        for node in nodes
    )


def first_line(error: BaseException) -> str:
    """What an exception says, shortly; of a task's, what its cause says."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {first_line(cause)}"
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _done(value: bool) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def _imported_ray() -> ModuleType:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return needed("ray", "ray")
    except ValueError as error:
        raise UserError(str(error)) from None


@contextmanager
def ray_pool(
    address: str,
    *,
    device: str = "cpu",
    gpus_per_shard: float | None = None,
    workers: int | None = None,
) -> Iterator[RayPool]:
    """A pool on a cluster, which is left at the end of the ``with``.

    Args:
        address: ``local`` for a new cluster on this machine, ``auto`` for the one this machine is
            part of, ``host:port``, or ``ray://host:port`` from outside.
        device: cpu or cuda.
        gpus_per_shard: below 1, several shards share a GPU; by default 1 on cuda.
        workers: shards at a time; by default as many as the cluster has room for.
    """
    if workers is not None and workers < 1:
        raise UserError(f"workers must be at least 1, not {workers}")
    resources = shard_resources(device, gpus_per_shard)
    ray = _imported_ray()
    with _connected(ray, address):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = room_for(resources, nodes)
        if not room:
            wanted = " and ".join(f"{n:g} {name}" for name, n in resources.items())
            raise UserError(
                f"no node of the Ray cluster {address!r} has {wanted} for a shard: add one"
            )
        yield RayPool(ray, device, resources, room if workers is None else workers)


@contextmanager
def _connected(ray: ModuleType, address: str) -> Iterator[None]:
    """Ray's connection, made in a thread of its own that lives as long.

    Ray may wait for minutes for a cluster that does not answer; and the processes of a cluster that
    it starts end with the thread that started them.
    """
    _require_answer(address)
    over, ready = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def connect() -> None:
        try:
            ray.init(address=address, **_options(address))
        except BaseException as error:
            errors.append(error)
        ready.set()
        over.wait()

    threading.Thread(target=connect, daemon=True).start()
    try:
        in_time = ready.wait(CONNECT_SECONDS)
        if errors or not in_time:
            reason = first_line(errors[0]) if errors else f"not ready in {CONNECT_SECONDS:g} s"
            raise UserError(f"Ray cluster {address!r}: {reason}")
        try:
            yield
        finally:
            ray.shutdown()
    finally:
        over.set()


def _options(address: str) -> dict[str, Any]:
    """Of ``ray.init``: send the packages along, and say nothing."""
    options: dict[str, Any] = {
        "runtime_env": {"py_modules": [str(Path(p.__path__[0])) for p in (kl_term, analysis)]},
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }
    return options | {"include_dashboard": False} if address == "local" else options


def _require_answer(address: str) -> None:
    """Where an address names host and port, find out at once whether anybody listens there."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        if address not in ("auto", "local"):
            raise UserError(
                f"Ray address {address!r}: give 'local', 'auto', host:port or ray://host:port"
            )
        return
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"Ray cluster {address!r} does not answer: {first_line(error)}") from None
