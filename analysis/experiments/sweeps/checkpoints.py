"""Checkpoints of a population in training: two generations, each sealed by a manifest.

A generation is a pair of files named by the number of finished updates: the trainer's tensors in
safetensors, and a sealed JSON manifest with their hash, written last. A checkpoint is taken up only
by the population, source, machine and versions that wrote it, because only then do the bits of the
rest follow. Nothing else in the folder is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import safetensors
import safetensors.torch

from analysis.experiments.ablations.settings import PopulationConfig
from analysis.experiments.ablations.stamp import Stamp
from analysis.experiments.sweeps.generations import Generation, Generations, tensors_of
from analysis.experiments.sweeps.sealed import Damaged, canonical, seal, unseal
from analysis.files import sha256_bytes
from analysis.schema import Schema
from analysis.training.config import Member
from analysis.training.records import Failure, TrainerState
from analysis.training.trainer import PopulationTrainer


class Population(Schema):
    """Members that are trained together."""

    config: PopulationConfig
    members: tuple[Member, ...]

    @property
    def key(self) -> str:
        return sha256_bytes(canonical(self))[:24]


class FailureField(Schema):
    """:class:`analysis.training.records.Failure`, to be stored."""

    member: int
    update: int
    step: int
    tensor: str


class Manifest(Schema):
    """What a checkpoint is, and the hash of its tensors."""

    format: Literal[1] = 1
    population: Population
    stamp: Stamp
    update: int
    failures: tuple[FailureField, ...]
    wall_seconds: float
    tensors_sha256: str


def populations(folder: Path) -> Iterator[tuple[Path, Population]]:
    """The population of each folder of checkpoints below ``folder``, where it can be read."""
    for path in sorted(folder.glob("*/*.json")):
        try:
            yield path.parent, unseal(path.read_bytes(), Manifest).population
        except (Damaged, FileNotFoundError):
            continue


class Checkpoints:
    """Those of one population, in a folder of their own.

    Args:
        folder: where the populations of a store have theirs.
        population: the members trained together.
        stamp: under what they are trained.
    """

    def __init__(self, folder: Path, population: Population, stamp: Stamp) -> None:
        self.files = Generations(folder / population.key)
        self.population = population
        self.stamp = stamp

    def save(self, state: TrainerState) -> None:
        """Write a generation and remove all but the last two.

        Raises:
            Refused: the disk is full or the folder is not writable.
        """
        data = safetensors.torch.save(state.tensors)
        manifest = Manifest(
            population=self.population,
            stamp=self.stamp,
            update=state.update,
            failures=tuple(FailureField(**f._asdict()) for f in state.failures),
            wall_seconds=state.wall_seconds,
            tensors_sha256=sha256_bytes(data),
        )
        self.files.put(Generation(state.update, seal(manifest), data))

    def restore(
        self,
        trainer: PopulationTrainer,
        set_aside: Callable[[Path], Path],
        say: Callable[[str], None],
    ) -> None:
        """Let ``trainer`` go on from the newest intact generation, if there is any.

        Args:
            trainer: of the population, before its first update.
            set_aside: moves a damaged file and returns its new place.
            say: hears which file was damaged, and how.
        """
        for path in self.files.manifests():
            try:
                manifest = self._manifest(path)
                if manifest.stamp != self.stamp:
                    say(f"{path}: of another source, machine or version; its members start over")
                    return self.discard()
                return trainer.restore(self._state(path, manifest))
            except ValueError as damage:
                for file in (path, tensors_of(path)):
                    if file.exists():
                        say(f"{file}: {damage}; moved to {set_aside(file)}")

    def discard(self) -> None:
        """Remove them all."""
        self.files.discard()

    def _manifest(self, path: Path) -> Manifest:
        manifest = unseal(path.read_bytes(), Manifest)
        if canonical(manifest.population) != canonical(self.population):
            raise Damaged("is of other members than its folder says")
        return manifest

    def _state(self, path: Path, manifest: Manifest) -> TrainerState:
        file = tensors_of(path)
        if not file.exists():
            raise Damaged(f"{file.name} is missing")
        data = file.read_bytes()
        if sha256_bytes(data) != manifest.tensors_sha256:
            raise Damaged(f"{file.name} does not match its checksum")
        try:
            tensors = safetensors.torch.load(data)
        except safetensors.SafetensorError:
            raise Damaged(f"{file.name} is no safetensors file") from None
        failures = tuple(Failure(**field.model_dump()) for field in manifest.failures)
        return TrainerState(manifest.update, tensors, failures, manifest.wall_seconds)
