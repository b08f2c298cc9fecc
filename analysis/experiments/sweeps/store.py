"""A folder of finished members: one sealed file each, named by what it is the result of.

A member's file is named by the hash of its validated configuration and the hash of the training
source. Layout::

    members/<key>-<source>.json    finished members
    checkpoints/<population>/      unfinished ones: see analysis.experiments.sweeps.checkpoints
    locks/<key>.lock               held by whoever computes that member
    quarantine/                    damaged files, kept to be looked at

Files appear whole or not at all. Members of an older source stay where they are and are stale.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from pydantic import ConfigDict, Field, model_validator

from analysis.experiments.ablations.settings import PopulationConfig
from analysis.experiments.ablations.stamp import Stamp
from analysis.experiments.sweeps.sealed import Damaged, canonical, seal, unseal
from analysis.files import replace_file, sha256_bytes
from analysis.schema import Schema
from analysis.training.config import Member
from analysis.training.metrics import METRICS
from analysis.training.records import Failure, RunRecord

#: A metric may be infinite, and is NaN once its member is frozen.
Metric = Annotated[float, Field(strict=False, allow_inf_nan=True)]


class MemberSpec(Schema):
    """What a member's result is a function of, source and machine aside."""

    config: PopulationConfig
    member: Member

    @property
    def key(self) -> str:
        return sha256_bytes(canonical(self))[:24]


class MemberFailure(Schema):
    """Where a member diverged: see :class:`analysis.training.records.Failure`."""

    update: int
    step: int
    tensor: str


class MemberRecord(Schema):
    """A finished member, diverged ones included."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    format: Literal[1] = 1
    spec: MemberSpec
    stamp: Stamp
    #: The first update of each logging window.
    updates: tuple[int, ...]
    #: Name in ``METRICS`` -> one value a window.
    metrics: dict[str, tuple[Metric, ...]]
    failure: MemberFailure | None
    #: The member's share of its population's wall time.
    wall_seconds: float
    finished_at: str

    @model_validator(mode="after")
    def _metrics_complete(self) -> MemberRecord:
        for name in sorted(METRICS.keys() ^ self.metrics.keys()):
            raise ValueError(f"metric {name} is {'missing' if name in METRICS else 'unknown'}")
        for name, values in self.metrics.items():
            if len(values) != len(self.updates):
                raise ValueError(f"metric {name} has {len(values)} of {len(self.updates)} windows")
        return self


class Stored(NamedTuple):
    """A file of the store, and what is in it: a record or the damage."""

    path: Path
    record: MemberRecord | None
    damage: str


def member_records(run: RunRecord, stamp: Stamp) -> list[MemberRecord]:
    """The records of a population's members, in their order."""
    failures = {
        f.member: MemberFailure(update=f.update, step=f.step, tensor=f.tensor) for f in run.failures
    }
    finished_at = datetime.now(UTC).isoformat(timespec="seconds")
    return [
        MemberRecord(
            spec=MemberSpec(config=run.config, member=member),
            stamp=stamp,
            updates=tuple(run.updates.tolist()),
            metrics={n: tuple(values[:, row].tolist()) for n, values in run.metrics.items()},
            failure=failures.get(row),
            wall_seconds=run.wall_seconds / len(run.members),
            finished_at=finished_at,
        )
        for row, member in enumerate(run.members)
    ]


def population_record(records: Sequence[MemberRecord]) -> RunRecord:
    """The inverse of :func:`member_records`, whichever populations the members were trained in."""
    config = records[0].spec.config
    stacked = {
        name: np.stack([r.metrics[name] for r in records], axis=1).astype(config.precision)
        for name in METRICS
    }
    return RunRecord(
        config=config,
        members=tuple(record.spec.member for record in records),
        updates=np.array(records[0].updates),
        metrics=stacked,
        failures=tuple(
            Failure(row, r.failure.update, r.failure.step, r.failure.tensor)
            for row, r in enumerate(records)
            if r.failure is not None
        ),
        wall_seconds=sum(record.wall_seconds for record in records),
    )


class Store:
    """The folder ``root``; it is made on the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def checkpoints(self) -> Path:
        """The folder of unfinished populations, each in one of its own."""
        return self.root / "checkpoints"

    def path(self, spec: MemberSpec, source: str) -> Path:
        """Where the member is, or will be, under that source."""
        return self.root / "members" / f"{spec.key}-{source[:12]}.json"

    def read(self, spec: MemberSpec, source: str) -> MemberRecord | None:
        """The stored member, or nothing.

        Raises:
            Damaged: the file is not what was written, or holds another member.
        """
        try:
            data = self.path(spec, source).read_bytes()
        except FileNotFoundError:
            return None
        record = unseal(data, MemberRecord)
        if canonical(record.spec) != canonical(spec):
            raise Damaged("holds another configuration than its name says")
        if record.stamp.source != source:
            raise Damaged("was computed under another source than its name says")
        return record

    def is_finished(self, spec: MemberSpec, source: str) -> bool:
        """Whether the member can be read; nothing is moved."""
        try:
            return self.read(spec, source) is not None
        except Damaged:
            return False

    def has_other(self, spec: MemberSpec, source: str) -> bool:
        """Whether the member was stored under another source than this one."""
        found = set((self.root / "members").glob(f"{spec.key}-*.json"))
        return bool(found - {self.path(spec, source)})

    def write(self, record: MemberRecord) -> None:
        """Store a finished member.

        Raises:
            Refused: the disk is full or the folder is not writable.
        """
        path = self.path(record.spec, record.stamp.source)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, seal(record))

    def salvage(
        self, spec: MemberSpec, source: str, say: Callable[[str], None]
    ) -> MemberRecord | None:
        """As :meth:`read`, but a damaged file is named, set aside and counts as nothing.

        Only under a :meth:`claim` of the member.
        """
        try:
            return self.read(spec, source)
        except Damaged as damage:
            path = self.path(spec, source)
            say(f"{path}: {damage}; moved to {self.quarantine(path)}, computed again")
            return None

    def quarantine(self, path: Path) -> Path:
        """Move a damaged file aside; its new place."""
        folder = self.root / "quarantine"
        folder.mkdir(parents=True, exist_ok=True)
        places = (folder / f"{path.name}.{n}" for n in range(1, 1_000_000))
        place = next(place for place in places if not place.exists())
        os.replace(path, place)
        return place

    @contextlib.contextmanager
    def claim(self, specs: Iterable[MemberSpec]) -> Iterator[bool]:
        """The right to compute all of these members, if nobody holds that of any; else False.

        It ends with the process, however that ends.
        """
        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            for key in sorted(spec.key for spec in specs):
                try:
                    held.enter_context(FileLock(folder / f"{key}.lock", timeout=0))
                except Timeout:
                    held.close()
                    yield False
                    return
                for torn in (self.root / "members").glob(f".{key}-*.tmp"):
                    torn.unlink()  # of a process that was killed while writing
            yield True

    def contents(self) -> Iterator[Stored]:
        """Every file of a finished member; nothing is moved."""
        for path in sorted((self.root / "members").glob("*.json")):
            try:
                yield Stored(path, unseal(path.read_bytes(), MemberRecord), "")
            except Damaged as damage:
                yield Stored(path, None, str(damage))
