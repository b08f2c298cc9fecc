"""A folder of finished runs: one checksummed file each, named by what it is the result of.

A run's file is named by the hash of its validated configuration and the hash of the training
source. Layout::

    runs/<key>-<source>.json    finished runs
    checkpoints/<key>/          unfinished shards: see analysis.sweeps.checkpoints
    locks/<key>.lock            held by whoever computes that run
    quarantine/                 corrupt files, kept to be looked at

Files appear whole or not at all. Runs of an older source stay where they are and are stale.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import numpy as np
from filelock import FileLock, Timeout
from pydantic import ConfigDict, Field, ValidationError, model_validator

from analysis.records.config import Run
from analysis.records.language import PopulationConfig
from analysis.records.preset import Preset
from analysis.records.provenance import Provenance
from analysis.records.run_record import Failure, RunRecord
from analysis.sweeps.provenance import source_of
from kl_term.errors import UserError, first_problem
from kl_term.files import replace_file, sha256_bytes
from kl_term.schema import Schema

if TYPE_CHECKING:
    import pandas as pd

Body = TypeVar("Body", bound=Schema)
#: A metric may be infinite, and is NaN once its run is frozen.
Metric = Annotated[float, Field(strict=False, allow_inf_nan=True)]


class CorruptFile(ValueError):
    """A stored file is not what was written; the message says how, not which."""


class Shard(Schema):
    """Runs that one worker trains together; results do not depend on which they are."""

    config: PopulationConfig
    runs: tuple[Run, ...]

    @property
    def key(self) -> str:
        return sha256_bytes(canonical(self))[:24]


class StoredRun(Schema):
    """A finished run, diverged ones included."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    format: Literal[3] = 3
    config: PopulationConfig
    run: Run
    provenance: Provenance
    #: The first update of each logging window.
    updates: tuple[int, ...]
    #: Name in ``config.logs`` -> one value a window.
    metrics: dict[str, tuple[Metric, ...]]
    #: Name in ``FINAL_METRICS`` -> value; empty where the configuration asks for none.
    final: dict[str, Metric]
    #: Where it diverged, if it did; its place is 0.
    failure: Failure | None
    #: The run's share of its shard's wall time.
    wall_seconds: float
    finished_at: str

    @model_validator(mode="after")
    def _metrics_complete(self) -> StoredRun:
        wanted = set(self.config.logs)
        for name in sorted(wanted ^ self.metrics.keys()):
            raise ValueError(f"metric {name} is {'missing' if name in wanted else 'unknown'}")
        for name, values in self.metrics.items():
            if len(values) != len(self.updates):
                raise ValueError(f"metric {name} has {len(values)} of {len(self.updates)} windows")
        return self


def run_key(config: PopulationConfig, run: Run) -> str:
    """What names a run: equal configurations, however they are written, have one key."""
    return Shard(config=config, runs=(run,)).key


def stored_runs(record: RunRecord, provenance: Provenance) -> list[StoredRun]:
    """The runs of a trained population, in their order."""
    failures = {failure.run: failure._replace(run=0) for failure in record.failures}
    finished_at = datetime.now(UTC).isoformat(timespec="seconds")
    return [
        StoredRun(
            config=record.config,
            run=run,
            provenance=provenance,
            updates=tuple(record.updates.tolist()),
            metrics={n: tuple(values[:, row].tolist()) for n, values in record.metrics.items()},
            final={n: values[row].item() for n, values in record.final.items()},
            failure=failures.get(row),
            wall_seconds=record.wall_seconds / len(record.runs),
            finished_at=finished_at,
        )
        for row, run in enumerate(record.runs)
    ]


def run_record(stored: Sequence[StoredRun]) -> RunRecord:
    """The inverse of :func:`stored_runs`, whichever shards the runs were trained in."""
    config = stored[0].config
    return RunRecord(
        config=config,
        runs=tuple(one.run for one in stored),
        updates=np.array(stored[0].updates),
        metrics={
            name: np.stack([one.metrics[name] for one in stored], axis=1).astype(config.precision)
            for name in config.logs
        },
        failures=tuple(
            one.failure._replace(run=row) for row, one in enumerate(stored) if one.failure
        ),
        wall_seconds=sum(one.wall_seconds for one in stored),
        final={
            name: np.array([one.final[name] for one in stored], dtype=config.precision)
            for name in stored[0].final
        },
    )


class Store:
    """The folder ``root``; it is made on the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def checkpoints(self) -> Path:
        """The folder of unfinished shards, each in one of its own."""
        return self.root / "checkpoints"

    def path(self, config: PopulationConfig, run: Run, source: str) -> Path:
        """Where the run is, or will be, under that source."""
        return self.root / "runs" / f"{run_key(config, run)}-{source[:12]}.json"

    def read(self, config: PopulationConfig, run: Run, source: str) -> StoredRun | None:
        """The stored run, or nothing.

        Raises:
            CorruptFile: the file is not what was written, or holds another run.
        """
        try:
            data = self.path(config, run, source).read_bytes()
        except FileNotFoundError:
            return None
        stored = without_checksum(data, StoredRun)
        asked = Shard(config=config, runs=(run,))
        if canonical(Shard(config=stored.config, runs=(stored.run,))) != canonical(asked):
            raise CorruptFile("holds another configuration than its name says")
        if stored.provenance.source != source:
            raise CorruptFile("was computed under another source than its name says")
        return stored

    def missing(
        self, shard: Shard, source: str, say: Callable[[str], None] | None = None
    ) -> tuple[Run, ...]:
        """The runs of a shard that cannot be read.

        Whoever holds the shard's lock gives ``say``: corrupt files are then set aside, and named.
        """
        found = []
        for run in shard.runs:
            try:
                if self.read(shard.config, run, source) is not None:
                    continue
            except CorruptFile as damage:
                if say is not None:
                    path = self.path(shard.config, run, source)
                    say(f"{path}: {damage}; moved to {self.quarantine(path)}, computed again")
            found.append(run)
        return tuple(found)

    def stale(self, config: PopulationConfig, runs: Iterable[Run], source: str) -> int:
        """How many of the runs are stored under another source than this one."""
        paths = [self.path(config, run, source) for run in runs]
        patterns = [f"{path.name.partition('-')[0]}-*.json" for path in paths]
        return sum(
            bool(set(path.parent.glob(pattern)) - {path})
            for path, pattern in zip(paths, patterns, strict=True)
        )

    def write(self, stored: StoredRun) -> None:
        """Store a finished run."""
        path = self.path(stored.config, stored.run, stored.provenance.source)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, with_checksum(stored))

    def quarantine(self, path: Path) -> Path:
        """Move a corrupt file aside; its new place."""
        folder = self.root / "quarantine"
        folder.mkdir(parents=True, exist_ok=True)
        places = (folder / f"{path.name}.{n}" for n in range(1, 1_000_000))
        place = next(place for place in places if not place.exists())
        os.replace(path, place)
        return place

    @contextlib.contextmanager
    def lock(self, shard: Shard) -> Iterator[bool]:
        """The right to compute all runs of a shard, if nobody holds that of any; else False.

        It ends with the process, however that ends.
        """
        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            for key in sorted(run_key(shard.config, run) for run in shard.runs):
                try:
                    held.enter_context(FileLock(folder / f"{key}.lock", timeout=0))
                except Timeout:
                    held.close()
                    yield False
                    return
                for torn in (self.root / "runs").glob(f".{key}-*.tmp"):
                    torn.unlink()  # of a process that was killed while writing
            yield True

    def contents(self) -> dict[Path, bytes]:
        """The files of finished runs, unchecked."""
        return {path: path.read_bytes() for path in sorted((self.root / "runs").glob("*.json"))}


def canonical(model: Schema) -> bytes:
    """The one JSON text of a validated model: 1 and 1.0, or fields in another order, are one."""
    checked = type(model).model_validate(model.model_dump())
    return _encode(json.loads(checked.model_dump_json()))


def with_checksum(body: Schema) -> bytes:
    """The bytes to store: the canonical text and its SHA-256, so that any change is noticed."""
    return _with_checksum(json.loads(canonical(body)))


def without_checksum(data: bytes, model: type[Body]) -> Body:
    """What :func:`with_checksum` was given.

    Raises:
        CorruptFile: a bit differs, or the body has not the fields of ``model``.
    """
    try:
        body = json.loads(data)["body"]
        intact = data == _with_checksum(body)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CorruptFile("no JSON with a checksum: it is torn or overwritten") from None
    if not intact:
        raise CorruptFile("its checksum does not match")
    try:
        return model.model_validate_json(_encode(body))
    except ValidationError as error:
        problem = first_problem(error, whole="body")
        raise CorruptFile(f"written by another version: {problem}") from None


def _with_checksum(body: Any) -> bytes:
    return _encode({"body": body, "sha256": sha256_bytes(_encode(body))})


def _encode(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def shards_of(preset: Preset, size: int) -> list[Shard]:
    """The runs of a preset in their order, ``size`` to a shard."""
    runs = preset.runs
    firsts = range(0, len(runs), size)
    return [Shard(config=preset.config, runs=runs[first : first + size]) for first in firsts]


def finished_runs(preset: Preset, store: Store, source: str) -> list[StoredRun]:
    """The stored runs of a preset, in its order."""
    stored = [store.read(preset.config, run, source) for run in preset.runs]
    found = [run for run in stored if run is not None]
    if len(found) < len(stored):
        raise UserError(
            f"{store.root}: {len(stored) - len(found)} of {len(stored)} runs of {preset.name!r} "
            "are missing: run the sweep"
        )
    return found


def stored_table(preset: Preset, store: Store) -> pd.DataFrame:
    """How many runs of each variant can be read, and how many are missing."""
    import pandas as pd  # a machine of a cluster has none

    missing = store.missing(Shard(config=preset.config, runs=preset.runs), source_of(preset.config))
    rows = [(run.variant.name, run.variant.beta, run in missing) for run in preset.runs]
    table = pd.DataFrame(rows, columns=["variant", "beta", "missing"])
    table["stored"] = ~table["missing"]
    return table.groupby(["variant", "beta"], sort=False)[["stored", "missing"]].sum().reset_index()
