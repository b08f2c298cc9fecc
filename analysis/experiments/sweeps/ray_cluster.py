"""A Ray cluster as the place of a sweep: connected to, or refused in one line.

This package is sent along, so that every machine computes under the source that started the sweep.
The cluster's Python needs what training needs, and filelock.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import analysis
from analysis.errors import Refused
from analysis.experiments.language_models.checkpoints import needed
from analysis.experiments.sweeps.crew import Order
from analysis.experiments.sweeps.ray_workers import RayCrew, first_line

#: To answer at all, and to be ready.
ANSWER_SECONDS = 5.0
CONNECT_SECONDS = 60.0


class RayCluster:
    """A cluster, until the end of the ``with``.

    Args:
        address: ``local`` for a new cluster on this machine, ``auto`` for the one this machine is
            part of, ``host:port``, or ``ray://host:port`` from outside.
        device: cpu or cuda.
        gpus_per_shard: below 1, several shards share a GPU; by default 1 on cuda.
        workers: shards at a time; by default as many as the cluster has room for.

    Raises:
        Refused: ray is not installed, the cluster does not answer, or it has no node on which a
            shard would fit.
    """

    def __init__(
        self,
        address: str,
        *,
        device: str = "cpu",
        gpus_per_shard: float | None = None,
        workers: int | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise Refused(f"workers must be at least 1, not {workers}")
        self.device = device
        self.resources = shard_resources(device, gpus_per_shard)
        self._ray = _imported_ray()
        self._connection = Connection(self._ray, address)
        try:
            nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            room = room_for(self.resources, nodes)
            if not room:
                wanted = " and ".join(f"{n:g} {name}" for name, n in self.resources.items())
                raise Refused(
                    f"no node of the Ray cluster {address!r} has {wanted} for a shard: add one"
                )
        except BaseException:
            self._connection.close()
            raise
        self.workers = room if workers is None else workers

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.close()

    def crew(self, order: Order) -> RayCrew:
        count = min(self.workers, order.shards)
        return RayCrew(self._ray, order, self.device, self.resources, count)


def shard_resources(device: str, gpus_per_shard: float | None) -> dict[str, float]:
    """What one shard occupies: a core, and on cuda a GPU or a share of one.

    Raises:
        Refused: a share that is not above 0 and at most 1, or one of a CPU.
    """
    if device == "cpu":
        if gpus_per_shard:
            raise Refused("gpus_per_shard is for device 'cuda'")
        return {"CPU": 1.0}
    share = 1.0 if gpus_per_shard is None else gpus_per_shard
    if not 0.0 < share <= 1.0:
        raise Refused(f"gpus_per_shard must be above 0 and at most 1, not {share:g}")
    return {"CPU": 1.0, "GPU": share}


def room_for(resources: Mapping[str, float], nodes: list[Mapping[str, float]]) -> int:
    """How many shards of these resources fit on all nodes together, none on two."""
    return sum(
        min(math.floor(node.get(name, 0.0) / amount) for name, amount in resources.items())
        for node in nodes
    )


def _imported_ray() -> ModuleType:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return needed("ray", "ray")
    except ValueError as error:
        raise Refused(str(error)) from None


class Connection:
    """Ray's connection, made in a thread of its own that lives as long.

    Ray may wait for minutes for a cluster that does not answer; and the processes of a cluster that
    it starts end with the thread that started them.

    Raises:
        Refused: there is none within ``CONNECT_SECONDS``.
    """

    def __init__(self, ray: ModuleType, address: str) -> None:
        _require_answer(address)
        self._ray, self._over, ready = ray, threading.Event(), threading.Event()
        errors: list[BaseException] = []

        def connect() -> None:
            try:
                ray.init(address=address, **_options(address))
            except BaseException as error:
                errors.append(error)
            ready.set()
            self._over.wait()

        threading.Thread(target=connect, daemon=True).start()
        in_time = ready.wait(CONNECT_SECONDS)
        if errors or not in_time:
            self._over.set()
            reason = first_line(errors[0]) if errors else f"not ready in {CONNECT_SECONDS:g} s"
            raise Refused(f"Ray cluster {address!r}: {reason}")

    def close(self) -> None:
        self._ray.shutdown()
        self._over.set()


def _options(address: str) -> dict[str, Any]:
    """Of ``ray.init``: send this package along, and say nothing."""
    options: dict[str, Any] = {
        "runtime_env": {"py_modules": [str(Path(analysis.__path__[0]))]},
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }
    return options | {"include_dashboard": False} if address == "local" else options


def _require_answer(address: str) -> None:
    """Where an address names host and port, find out at once whether anybody listens there."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        if address not in ("auto", "local"):
            raise Refused(
                f"Ray address {address!r}: give 'local', 'auto', host:port or ray://host:port"
            )
        return
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise Refused(f"Ray cluster {address!r} does not answer: {first_line(error)}") from None
