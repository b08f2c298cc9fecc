"""Sweeps that are killed at random instants, and stores whose disk fails."""

from __future__ import annotations

import builtins
import contextlib
import errno
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import torch

import kl_term.files
from analysis.records.config import PolicyConfig, Run, SortTask, StartConfig, TrainConfig
from analysis.records.manifests import REQUIRED, read_manifest, write_folder
from analysis.records.preset import Preset
from analysis.records.run_record import RunRecord
from analysis.records.variants import Variant
from analysis.studies.presets.parts import NO_KL
from analysis.sweeps import pools, sweep
from analysis.sweeps.pools import LocalPool
from analysis.sweeps.progress import Progress
from analysis.sweeps.provenance import source_of
from analysis.sweeps.shard import complete_shard
from analysis.sweeps.store import CorruptFile, Shard, Store, StoredRun, without_checksum
from analysis.training.environment_of import environment_of
from analysis.training.trainer import PopulationTrainer
from kl_term.errors import UserError
from kl_term.kl.term import KLTerm
from torture.outcome import Outcome

UPDATES, CHECKPOINT_EVERY, RUNS_PER_SHARD, WORKERS = 30, 2, 2, 2
#: A kill comes at an instant between nothing and this share of an undisturbed sweep.
LATEST = 0.9
#: What a failing operation of the disk says.
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)
OPERATIONS = ("write", "fsync", "rename")


def tiny() -> Preset:
    """Six runs in three shards, of about a second."""
    losses = (KLTerm(estimator="k3"), KLTerm(estimator="k1", placement="reward"))
    return Preset(
        name="tiny",
        config=TrainConfig(
            task=SortTask(num_digits=3, end_token=True, reward="graded"),
            policy=PolicyConfig(width=12, num_layers=1, num_heads=3),
            start=StartConfig(updates=2, batch_size=4),
            updates=UPDATES,
            num_prompts=2,
            group_size=4,
            log_every=5,
        ),
        variants=(NO_KL, *(Variant(kl=kl, beta=0.5) for kl in losses)),
        seeds=(0, 1),
        predictions=(),
    )


def counted(
    part: Shard, device: str, report: Callable[[str | int], None], *, folder: Path, **options: Any
) -> bool:
    """``complete_shard``, which leaves a byte in a file for each run-update computed."""
    before: int | None = None

    def count(news: str | int) -> None:
        nonlocal before
        if isinstance(news, int):
            if before is not None:
                with open(folder / "computed", "ab") as file:
                    file.write(b"." * (news - before))
            before = news
        report(news)

    return complete_shard(part, device, count, folder=folder, **options)


def sweep_once(folder: Path, source: str, begun: Connection) -> None:
    """A whole sweep, in a process of its own whose workers are forks of it."""
    sweep.complete_shard, sweep.source_of = counted, lambda config: source
    pools.MAX_DEATHS = 1_000_000
    pools._context = lambda: multiprocessing.get_context("fork")
    begun.send(None)
    with open(os.devnull, "w") as nowhere:
        sweep.run_sweep(
            tiny(),
            Store(folder),
            Progress(nowhere),
            LocalPool(workers=WORKERS),
            runs_per_shard=RUNS_PER_SHARD,
            checkpoint_every=CHECKPOINT_EVERY,
        )


def straight(config: TrainConfig, runs: Sequence[Run] | None = None) -> RunRecord:
    """The same runs in one process and one population, undisturbed."""
    return PopulationTrainer(config, runs or tiny().runs, environment_of(config)).run()


def kills(count: int, chance: random.Random, say: Callable[[str], None]) -> list[Outcome]:
    """SIGKILL to a sweep or, one time in three, to one of its workers.

    A folder whose sweep came to its end is compared with an undisturbed run, and replaced.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torture.warm"])
    config, wanted = tiny().config, len(tiny().runs)
    source, expected = source_of(config), straight(config)
    lost = silent = computed = needed = killed = workers = 0
    with tempfile.TemporaryDirectory() as root:
        folder, kept, usual = Path(root, "usual"), {}, 1.0
        while killed + workers < count or folder.is_dir():
            folder.mkdir(exist_ok=True)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=sweep_once, args=(folder, source, sender))
            process.start()
            receiver.recv()
            began = time.monotonic()
            if folder.name == "usual" or killed + workers >= count:
                process.join()
            else:
                process.join(chance.uniform(0.0, LATEST) * usual)
            if folder.name == "usual":
                usual = time.monotonic() - began
            elif process.is_alive() and killed + workers < count:
                if chance.random() < 1 / 3 and _kill_worker(process.pid):
                    workers += 1
                else:
                    killed += 1
                    process.kill()
                process.join()
            now = Store(folder).contents()
            lost += sum(now.get(path) != data for path, data in kept.items())
            kept = now
            if len(now) == wanted and process.exitcode == 0:
                silent += _differing(now, expected)
                silent += any(folder.glob("checkpoints/*")) + len(list(folder.rglob("*.tmp")))
                if folder.name != "usual":
                    computed += (folder / "computed").stat().st_size
                    needed += wanted * UPDATES
                folder, kept = Path(root, f"{killed + workers}-{needed}"), {}
                say(f"{killed + workers} of {count} kills")
    # A kill may come between an update and its byte: one update of each worker.
    computed += RUNS_PER_SHARD * (WORKERS * killed + workers)
    ratio = computed / needed if needed else 1.0
    return [
        Outcome("sweep killed", killed, lost, silent, ratio),
        Outcome("worker killed", workers, 0, 0, ratio),
    ]


def _kill_worker(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            child.kill()
            return True
    return False


def _differing(files: dict[Path, bytes], expected: RunRecord) -> int:
    """How many files hold no run that is, bit for bit, that of the undisturbed record."""
    place = {run: row for row, run in enumerate(expected.runs)}

    def differs(data: bytes) -> bool:
        try:
            one = without_checksum(data, StoredRun)
        except CorruptFile:
            return True
        return any(
            not np.array_equal(
                np.array(one.metrics[name]), values[:, place[one.run]], equal_nan=True
            )
            for name, values in expected.metrics.items()
        )

    return sum(map(differs, files.values()))


class _Torn:
    """A file of which only half of what is written arrives."""

    def __init__(self, file: Any, number: int) -> None:
        self._file, self._number = file, number

    def __enter__(self) -> _Torn:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        self._file.write(data[: len(data) // 2])
        raise OSError(self._number, os.strerror(self._number))


@contextmanager
def failing(operation: str, nth: int, number: int) -> Iterator[list[int]]:
    """Let the ``nth`` such operation of the disk fail; yields a list with their count."""
    calls = [0]

    def due() -> bool:
        calls[0] += 1
        return calls[0] == nth

    def opened(path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        file = builtins.open(path, mode, *rest, **options)  # noqa: SIM115
        return _Torn(file, number) if "w" in mode and due() else file

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(*arguments: Any) -> Any:
            if due():
                raise OSError(number, os.strerror(number))
            return call(*arguments)

        return maybe

    before = os.fsync, os.replace, os.rename, Path.write_text
    if operation == "write":
        kl_term.files.open = opened  # type: ignore[attr-defined]
        Path.write_text = wrapped(Path.write_text)  # type: ignore[method-assign]
    elif operation == "fsync":
        os.fsync = wrapped(os.fsync)
    else:
        os.replace, os.rename = wrapped(os.replace), wrapped(os.rename)
    try:
        yield calls
    finally:
        os.fsync, os.replace, os.rename, Path.write_text = before  # type: ignore[method-assign]
        if operation == "write":
            del kl_term.files.open  # type: ignore[attr-defined]


def failing_disks(say: Callable[[str], None], every: int = 1) -> list[Outcome]:
    """Each operation of a shard, and of recording it, fails once in each way.

    Args:
        every: of the failures, one in so many is tried.
    """
    preset = tiny()
    config = preset.config.model_copy(update={"updates": 20})
    part = Shard(config=config, runs=preset.runs[:2])
    source = source_of(config)
    options = {"source": source, "checkpoint_every": CHECKPOINT_EVERY}
    expected = straight(config, part.runs)
    outcomes = []
    for operation in OPERATIONS:
        tried = lost = silent = 0
        with tempfile.TemporaryDirectory() as folder, failing(operation, 0, 0) as calls:
            complete_shard(part, "cpu", _quiet, folder=Path(folder), **options)
        for nth in range(1, calls[0] + 1, every):
            for number in ERRORS:
                with tempfile.TemporaryDirectory() as folder:
                    store, tried = Store(Path(folder)), tried + 1
                    try:
                        with failing(operation, nth, number):
                            complete_shard(part, "cpu", _quiet, folder=store.root, **options)
                        silent += 1  # it failed, and nobody was told
                    except UserError:
                        pass
                    kept = store.contents()
                    silent += _differing(kept, expected) + any(store.root.rglob("*.tmp"))
                    complete_shard(part, "cpu", _quiet, folder=store.root, **options)
                    after = store.contents()
                    lost += sum(after.get(path) != data for path, data in kept.items())
                    silent += _differing(after, expected)
                    silent += len(after) != len(part.runs)
        outcomes.append(Outcome(f"{operation} fails: store", tried, lost, silent))
        outcomes.append(_failing_recording(operation))
        say(f"{operation}: {tried} failures")
    return outcomes


def _failing_recording(operation: str) -> Outcome:
    """A recording that is replaced while the disk fails is the old one or the new one."""
    tables = [
        {"a.csv": pd.DataFrame({"x": [n]}), "b.csv": pd.DataFrame({"y": [n]})} for n in (1, 2)
    ]
    fields = {name: kind() for name, kind in REQUIRED.items()}
    tried = lost = silent = 0
    with tempfile.TemporaryDirectory() as root, failing(operation, 0, 0) as calls:
        write_folder(Path(root, "r"), tables[0], fields)
        calls[0] = 0
        write_folder(Path(root, "r"), tables[1], fields)
    assert calls[0], f"a recording does no {operation}"
    for nth in range(1, calls[0] + 1):
        for number in ERRORS:
            with tempfile.TemporaryDirectory() as root:
                place, tried = Path(root, "r"), tried + 1
                write_folder(place, tables[0], fields)
                with contextlib.suppress(OSError, UserError), failing(operation, nth, number):
                    write_folder(place, tables[1], fields)
                    silent += 1
                try:
                    read_manifest(place)
                except ValueError:
                    lost += 1
                silent += len(list(Path(root).iterdir())) != 1
    return Outcome(f"{operation} fails: recording", tried, lost, silent)


def _quiet(_: str | int) -> None:
    """Nobody listens."""


torch.set_num_threads(1)
