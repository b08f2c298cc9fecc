"""Checkpoints of a shard in training: the last two, each a file that notices any change.

A file is named by the number of finished updates. Its first line is JSON with a checksum, which
says what the checkpoint is of and holds the hash of the rest: the trainer's tensors as safetensors.
A checkpoint is taken up only by the shard, source, machine and versions that wrote it, because only
then do the bits of the rest follow. Nothing else in the folder is opened.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import safetensors
import safetensors.torch

from analysis.records.provenance import Provenance
from analysis.records.run_record import Failure
from analysis.sweeps.store import CorruptFile, Shard, canonical, with_checksum, without_checksum
from analysis.training.trainer import PopulationTrainer, TrainerState
from kl_term.files import replace_file, sha256_bytes
from kl_term.schema import Schema

#: The last one, and the one before for when that is corrupt.
KEPT = 2


class Header(Schema):
    """What a checkpoint is of, and the hash of its tensors."""

    format: Literal[2] = 2
    shard: Shard
    provenance: Provenance
    update: int
    failures: tuple[Failure, ...]
    wall_seconds: float
    tensors_sha256: str


class Checkpoints:
    """Those of one shard.

    Args:
        folder: where the shards of a store have theirs.
        shard: the runs trained together.
    """

    def __init__(self, folder: Path, shard: Shard) -> None:
        self.folder = folder / shard.key
        self.shard = shard

    def paths(self) -> list[Path]:
        """Its checkpoints, the newest first."""
        paths = self.folder.glob("*.checkpoint")
        return sorted((p for p in paths if re.fullmatch(r"\d{8}", p.stem)), reverse=True)

    def write(self, name: str, data: bytes) -> None:
        """Put a checkpoint into the folder and remove all but the last two."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / name, data)
        for old in self.paths()[KEPT:]:
            old.unlink()

    def save(self, state: TrainerState, provenance: Provenance) -> None:
        """Write the state of a trainer."""
        data = safetensors.torch.save(state.tensors)
        header = Header(
            shard=self.shard,
            provenance=provenance,
            update=state.update,
            failures=state.failures,
            wall_seconds=state.wall_seconds,
            tensors_sha256=sha256_bytes(data),
        )
        self.write(f"{state.update:08d}.checkpoint", with_checksum(header) + b"\n" + data)

    def restore(
        self,
        trainer: PopulationTrainer,
        provenance: Provenance,
        quarantine: Callable[[Path], Path],
        say: Callable[[str], None],
    ) -> None:
        """Let ``trainer`` go on from the newest intact checkpoint, if there is any.

        ``quarantine`` moves a corrupt file and returns its new place; ``say`` is told which.
        """
        for path in self.paths():
            try:
                header, data = _parts(path)
                if canonical(header.shard) != canonical(self.shard):
                    raise CorruptFile("is of other runs than its folder says")
                if not header.provenance.gives_bits_of(provenance):
                    say(f"{path}: of another source, machine or version; its runs start over")
                    return self.discard()
                return trainer.restore(_state(header, data))
            except ValueError as damage:
                say(f"{path}: {damage}; moved to {quarantine(path)}")

    def discard(self) -> None:
        """Remove them all."""
        shutil.rmtree(self.folder, ignore_errors=True)


def unfinished(folder: Path) -> Iterator[Checkpoints]:
    """The shards that have a readable checkpoint below ``folder``."""
    for path in sorted(folder.glob("*/*.checkpoint")):
        try:
            yield Checkpoints(folder, _parts(path)[0].shard)
        except (CorruptFile, FileNotFoundError):
            continue


def _parts(path: Path) -> tuple[Header, bytes]:
    line, _, data = path.read_bytes().partition(b"\n")
    return without_checksum(line, Header), data


def _state(header: Header, data: bytes) -> TrainerState:
    if sha256_bytes(data) != header.tensors_sha256:
        raise CorruptFile("its tensors do not match their checksum")
    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError:
        raise CorruptFile("its tensors are no safetensors") from None
    return TrainerState(header.update, tensors, header.failures, header.wall_seconds)
