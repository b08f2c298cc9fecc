"""A sweep's shards as tasks on a Ray cluster: one shard a task, nothing shared but the cluster.

The sweep's own process claims the members and is the only one that touches the store. A task trains
in a folder of its own and sends its checkpoints and finished members back as the sealed bytes of
their files; when it is lost, the next one is given the last checkpoints. So a store filled by a
cluster is the store a single machine would have filled, and either goes on where the other stopped.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from analysis.errors import Refused
from analysis.experiments.ablations.stamp import current_stamp
from analysis.experiments.sweeps.checkpoints import Population
from analysis.experiments.sweeps.crew import (
    BUSY_SECONDS,
    THREADS,
    Advanced,
    Died,
    Event,
    Failed,
    Order,
    Said,
    attempt,
)
from analysis.experiments.sweeps.generations import Generation, Generations
from analysis.experiments.sweeps.sealed import unseal
from analysis.experiments.sweeps.shards import Job, Outcome, Shard, missing_members
from analysis.experiments.sweeps.store import MemberRecord, Store

#: How often the sweep looks for news, and a task tells how far it is.
POLL_SECONDS = 0.2
TELL_SECONDS = 0.5
#: On the head node, without which there is no cluster; begun again, empty, should it be killed.
LETTERBOX = {
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


class Letter(NamedTuple):
    """What a task sends before its end."""

    task: int
    content: Event | Generation


class Ended(NamedTuple):
    """What a task returns."""

    outcome: Outcome | Failed
    members: tuple[bytes, ...]  #: files of the finished ones


class Letterbox:
    """An actor that keeps letters until the sweep asks for them."""

    def __init__(self) -> None:
        self._letters: list[Letter] = []

    def post(self, letter: Letter) -> None:
        self._letters.append(letter)

    def take(self) -> list[Letter]:
        letters, self._letters = self._letters, []
        return letters


class Sender:
    """A task's side of the letterbox; tells how far it is now and then, and sends checkpoints."""

    def __init__(self, task: int, box: Any, updates: int, checkpoints: Generations) -> None:
        self._task, self._box, self._updates = task, box, updates
        self._checkpoints, self._sent = checkpoints, checkpoints.manifests()[:1]
        self._told = -float("inf")

    def tell(self, event: Event) -> None:
        if isinstance(event, Advanced):
            newest = self._checkpoints.manifests()[:1]
            if newest and newest != self._sent:
                self._post(self._checkpoints.all()[-1])
            self._sent = newest
            now = time.monotonic()
            if now - self._told < TELL_SECONDS and event.updates < self._updates:
                return
            self._told = now
        self._post(event)

    def _post(self, content: Event | Generation) -> None:
        self._box.post.remote(Letter(self._task, content))


def train_shard(
    shard: Shard, order: Order, device: str, task: int, box: Any, kept: tuple[Generation, ...]
) -> Ended:
    """A task: complete a shard in a folder of its own, from the checkpoints ``kept``, if any."""
    torch.set_num_threads(THREADS)
    if device == "cuda" and not torch.cuda.is_available():
        return Ended(Failed(f"{platform.node()}: torch sees no GPU there"), ())
    stamp = current_stamp(shard.config, device, THREADS)
    if stamp.source != order.source:
        return Ended(Failed(f"{platform.node()}: the source changed since the sweep began"), ())
    with tempfile.TemporaryDirectory(prefix="kl-term-") as folder:
        job = Job(Path(folder), stamp, device, order.checkpoint_every, order.graphs)
        store = Store(job.store)
        population = Population(config=shard.config, members=shard.members)
        checkpoints = Generations(store.checkpoints / population.key)
        for generation in kept:
            checkpoints.put(generation)
        sender = Sender(task, box, shard.config.updates, checkpoints)
        outcome = attempt(shard, job, sender.tell)
        return Ended(outcome, tuple(stored.path.read_bytes() for stored in store.contents()))


class Running(NamedTuple):
    """A task, as the sweep sees it."""

    shard: int
    task: int
    claim: ExitStack
    checkpoints: Generations


class RayCrew:
    """At most ``count`` tasks at a time, each with the resources of a shard."""

    def __init__(
        self,
        ray: ModuleType,
        order: Order,
        device: str,
        resources: Mapping[str, float],
        count: int,
    ) -> None:
        self._ray, self._order, self._device, self._count = ray, order, device, count
        self._store = Store(order.store)
        self._train = ray.remote(
            num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0.0), max_retries=0
        )(train_shard)
        self._box = ray.remote(**LETTERBOX)(Letterbox).remote()
        self._running: dict[Any, Running] = {}
        self._events: list[tuple[int, Event]] = []
        self._tasks = 0

    @property
    def idle(self) -> int:
        return self._count - len(self._running)

    @property
    def busy(self) -> int:
        return len(self._running) + len(self._events)

    def start(self, number: int, shard: Shard) -> None:
        with ExitStack() as claim:
            if not claim.enter_context(self._store.claim(shard.specs)):
                time.sleep(BUSY_SECONDS)
                self._events.append((number, Outcome.BUSY))
                return
            missing = missing_members(
                shard,
                self._store,
                self._order.source,
                lambda text: self._events.append((number, Said(text))),
            )
            if not missing:
                self._events.append((number, Outcome.FINISHED))
                return
            population = Population(config=shard.config, members=missing)
            checkpoints = Generations(self._store.checkpoints / population.key)
            self._tasks += 1
            with self._ray_errors():
                reference = self._train.remote(
                    shard._replace(members=missing),
                    self._order,
                    self._device,
                    self._tasks,
                    self._box,
                    tuple(checkpoints.all()),
                )
            self._running[reference] = Running(number, self._tasks, claim.pop_all(), checkpoints)

    def hear(self) -> list[tuple[int, Event]]:
        with self._ray_errors():
            self._poll(0.0 if self._events else POLL_SECONDS)
            while not self._events:
                self._poll(POLL_SECONDS)
        heard, self._events = self._events, []
        return heard

    def stop(self) -> None:
        for reference, running in self._running.items():
            running.claim.close()
            self._ray.cancel(reference, force=True)
        self._ray.kill(self._box)

    @contextmanager
    def _ray_errors(self) -> Iterator[None]:
        """A lost cluster is refused; what a signal handler raises comes as it was raised."""
        try:
            yield
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise Refused(
                f"the Ray cluster is lost ({first_line(error)}): what is stored stays; "
                "run the sweep again"
            ) from None
        except SystemError as error:
            raise error.__cause__ or error from None

    def _poll(self, seconds: float) -> None:
        """Note what came within that time."""
        if not self._running:
            return
        ended, _ = self._ray.wait(list(self._running), timeout=seconds)
        for letter in self._ray.get(self._box.take.remote()):
            self._read(letter)
        for reference in ended:
            self._end(reference)

    def _read(self, letter: Letter) -> None:
        """Letters of tasks that are over by now are not."""
        for running in self._running.values():
            if running.task == letter.task:
                if isinstance(letter.content, Generation):
                    running.checkpoints.put(letter.content)
                else:
                    self._events.append((running.shard, letter.content))

    def _end(self, reference: Any) -> None:
        running = self._running.pop(reference)
        with running.claim:
            self._events.append((running.shard, self._outcome(reference, running)))

    def _outcome(self, reference: Any, running: Running) -> Outcome | Failed | Died:
        """Of a task that is over; what it finished is stored."""
        try:
            ended = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            for kind in type(error).__mro__:
                if kind.__name__ in DEATHS:
                    return Died(DEATHS[kind.__name__])
            return Failed(f"a task on the Ray cluster failed: {first_line(error)}")
        for data in ended.members:
            self._store.write(unseal(data, MemberRecord))
        if ended.outcome is Outcome.FINISHED:
            running.checkpoints.discard()
        return ended.outcome


def first_line(error: BaseException) -> str:
    """What an exception says, shortly; of a task's, what its cause says."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {first_line(cause)}"
    return str(error).strip().partition("\n")[0] or type(error).__name__
