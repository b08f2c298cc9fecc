"""The files of a population's checkpoints: pairs named by the number of finished updates."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from analysis.files import replace_file

#: The last one, and the one before for when that is damaged.
GENERATIONS = 2


class Generation(NamedTuple):
    """A checkpoint as bytes, to be written or sent."""

    update: int
    manifest: bytes
    tensors: bytes


class Generations:
    """Those in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def manifests(self) -> list[Path]:
        """Newest first."""
        paths = self.folder.glob("*.json")
        return sorted((p for p in paths if re.fullmatch(r"\d{8}", p.stem)), reverse=True)

    def put(self, generation: Generation) -> None:
        """Write a generation, its manifest last, and remove all but the last two.

        Raises:
            Refused: the disk is full or the folder is not writable.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{generation.update:08d}.json"
        replace_file(path.with_suffix(".safetensors"), generation.tensors)
        replace_file(path, generation.manifest)
        for old in self.manifests()[GENERATIONS:]:
            old.unlink()
            old.with_suffix(".safetensors").unlink(missing_ok=True)

    def all(self) -> list[Generation]:
        """What is there, oldest first; intact or not."""
        return [
            Generation(int(path.stem), path.read_bytes(), tensors_of(path).read_bytes())
            for path in reversed(self.manifests())
            if tensors_of(path).exists()
        ]

    def discard(self) -> None:
        """Remove them all."""
        shutil.rmtree(self.folder, ignore_errors=True)


def tensors_of(manifest: Path) -> Path:
    """The other file of the pair."""
    return manifest.with_suffix(".safetensors")
