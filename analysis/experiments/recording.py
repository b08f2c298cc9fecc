"""A recording: a trained population as tables in a folder, with a manifest of their hashes.

``curves.csv`` holds the tidy curves, ``final.csv`` one row per run, both with six significant
digits. The manifest says what was trained, under which source, on which device, with which
versions, and is sealed by its own hash. A folder appears whole or not at all. ``analysis sweep NAME
--record FOLDER`` makes one.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from pydantic import ValidationError

import analysis
from analysis.errors import UserError
from analysis.experiments.ablation import final, tidy, train
from analysis.experiments.environment import environment_of
from analysis.experiments.preset import Preset
from analysis.experiments.provenance import Provenance, current_provenance
from analysis.files import replace_file, sealed, sha256_file, unsealed
from analysis.training.metrics import METRICS
from analysis.training.trainer import RunRecord

#: Where recorded folders lie.
RESULTS = Path(analysis.__path__[0]).parent / "results"
#: The recorded runs of the presets ``full`` and ``half_step``.
RECORDED = RESULTS / "grpo_tiny_cpu"
RECORDED_HALF_STEP = RESULTS / "grpo_tiny_cpu_half_step"
#: The first, trained once more on another make of processor.
RECORDED_ELSEWHERE = RESULTS / "grpo_tiny_cpu_elsewhere"
MANIFEST = "manifest.json"
FLOAT_FORMAT = "%.6g"


class Recording(NamedTuple):
    """A trained population: a preset's runs, their curves, and how they came about."""

    preset: Preset
    curves: pd.DataFrame  #: tidy, one row per run and logging window
    finals: pd.DataFrame  #: one row per run
    manifest: dict[str, Any]

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Runs that diverged, by their place in ``preset.runs``."""
        return self.manifest["failures"]


def run(preset: Preset, *, device: torch.device | str = "cpu", progress: bool = False) -> Recording:
    """Train the population of a preset in this process, as many runs at a time as memory holds.

    Raises:
        ValueError: a pretrained model or an optional package of the preset cannot be had.
    """
    provenance = current_provenance(preset.config, device)
    environment = environment_of(preset.config, device)
    records = train(preset.config, preset.runs, environment, progress=progress)
    return of_records(preset, records, provenance)


def of_records(preset: Preset, records: Sequence[RunRecord], provenance: Provenance) -> Recording:
    """What a trained population would be recorded as; failures name runs by their place in all."""
    curves = pd.concat([tidy(record) for record in records], ignore_index=True)
    manifest = {
        "preset": preset.name,
        "seeds": list(preset.seeds),
        **provenance.model_dump(),
        "wall_seconds": round(sum(record.wall_seconds for record in records), 1),
        "failures": [failure._asdict() for record in records for failure in record.failures],
        "configuration": preset.model_dump(mode="json"),
    }
    return Recording(preset, curves, final(curves), manifest)


def folder_of(name: str) -> Path:
    """Where a CPU recording lies: in the folder of that name, or the first of that preset."""
    named = RESULTS / f"{name}_cpu"
    if named.is_dir():
        return named
    return next((path for path in sorted(RESULTS.glob("*")) if _is_of(path, name)), named)


def _is_of(folder: Path, preset: str) -> bool:
    return (folder / MANIFEST).is_file() and manifest_of(folder).get("preset") == preset


def save(recording: Recording, directory: Path) -> None:
    """Write a recording to ``directory``, replacing what it held.

    Raises:
        UserError: see :func:`check_target`.
    """
    tables = {"curves.csv": recording.curves, "final.csv": recording.finals}
    write_folder(directory, tables, recording.manifest)


def load(directory: Path) -> Recording:
    """Read a recording, after checking its files against the manifest.

    Raises:
        ValueError: a file is missing or is not the one that was recorded, or its configuration is
            no longer understood.
    """
    manifest = read_manifest(directory)
    curves, finals = (read_table(directory / name) for name in ("curves.csv", "final.csv"))
    try:
        preset = Preset.model_validate_json(json.dumps(manifest["configuration"]))
    except ValidationError:
        raise ValueError(
            f"{directory} was recorded by a version with other variants than this one: record "
            f"it again with analysis sweep {manifest['preset']} --record {directory}"
        ) from None
    return Recording(preset, curves, finals, manifest)


def rerun(
    recorded: Recording, variant: str, beta: float, seed: int, *, windows: int
) -> pd.DataFrame:
    """Train one recorded run again, alone, for its first logging windows; compare.

    Returns:
        One row per window and metric measured: ``recorded``, ``again`` and their ``difference``. On
        the recording machine the difference is the rounding to six digits. On another, sums differ
        in the last bit; from the first update at which that flips a sampled token, the runs part.

    Raises:
        ValueError: if the recording has no such run.
    """
    preset = recorded.preset
    runs = [
        m for m in preset.runs if (m.variant.name, m.variant.beta, m.seed) == (variant, beta, seed)
    ]
    if not runs:
        raise ValueError(f"no run {variant!r} with beta={beta} and seed={seed} in {preset.name!r}")
    config = preset.config.model_copy(update={"updates": windows * preset.config.log_every})
    (record,) = train(config, runs, environment_of(config))
    both = compared(recorded.curves, tidy(record))
    return both[["update", "metric", "recorded", "again", "difference"]]


def compared(curves: pd.DataFrame, again: pd.DataFrame) -> pd.DataFrame:
    """Tidy curves of some runs trained again, beside the recorded ones.

    Returns:
        One row per run, window and metric of ``again`` that either has measured: ``variant``,
        ``beta``, ``seed``, ``update``, ``metric``, ``recorded``, ``again`` and ``difference``, its
        absolute value. A number that only one of them has is NaN in the other.
    """
    keys = ["variant", "beta", "seed", "update"]
    tables = [
        table.astype({"beta": float}).melt(keys, list(METRICS), "metric")
        for table in (curves, again)
    ]
    both = tables[0].merge(
        tables[1], how="right", on=[*keys, "metric"], suffixes=("_recorded", "_again")
    )
    both = both.rename(columns={"value_recorded": "recorded", "value_again": "again"})
    both = both.dropna(subset=["recorded", "again"], how="all").reset_index(drop=True)
    both["difference"] = (both["recorded"] - both["again"]).abs()
    return both


def check_target(directory: Path) -> None:
    """Refuse a place where recording would destroy something that is no recording.

    Raises:
        UserError: a file, a folder that one is in, or a folder with other things than a recording.
    """
    if directory.is_file():
        raise UserError(f"{directory} is a file: name a folder to record in")
    if Path.cwd().is_relative_to(directory.resolve()):
        raise UserError(f"{directory} holds the folder you are in: name a new folder to record in")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MANIFEST).is_file():
        raise UserError(f"{directory} is no recording, and would be replaced: name a new folder")


def write_folder(
    directory: Path, tables: Mapping[str, pd.DataFrame], fields: Mapping[str, Any]
) -> None:
    """Write tables and their manifest, replacing what the folder held.

    Args:
        tables: by file name.
        fields: of the manifest; the time, the hash of each file and the seal are added.

    Raises:
        UserError: see :func:`check_target`.
    """
    check_target(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    before = partial.with_name(f"{partial.name}-before")
    try:
        for name, table in tables.items():
            (partial / name).write_text(_as_text(table))
        manifest = {
            **fields,
            "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "files": {name: sha256_file(partial / name) for name in tables},
        }
        (partial / MANIFEST).write_bytes(sealed(manifest))
        partial.chmod(0o755)
        if directory.exists():
            os.replace(directory, before)
        os.replace(partial, directory)
        shutil.rmtree(before, ignore_errors=True)
    except BaseException:
        if before.exists() and not directory.exists():
            os.replace(before, directory)  # the earlier recording is where it was
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a recorded folder, once its files are found to be those it names.

    Raises:
        ValueError: as :func:`manifest_of`, or a file is missing or is not the recorded one.
    """
    manifest = manifest_of(directory)
    _check_files(directory, manifest)
    return manifest


def _check_files(directory: Path, manifest: Mapping[str, Any]) -> None:
    for name, digest in manifest["files"].items():
        file = directory / name
        if not file.is_file() or sha256_file(file) != digest:
            raise ValueError(f"{file} is missing or changed since it was recorded: restore it")


def manifest_of(directory: Path) -> dict[str, Any]:
    """The manifest of a recorded folder, its files unread.

    Raises:
        ValueError: it is missing, was edited or is none.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(f"{path} is missing: record the run again")
    try:
        manifest = unsealed(path.read_bytes())
    except ValueError as damage:
        raise ValueError(f"{path} {damage}: restore it or record the run again") from None
    if not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{path} is no manifest, it lists no files: restore it")
    return manifest


def read_table(source: Path | io.StringIO) -> pd.DataFrame:
    """A table of a recorded folder: only an empty field is NaN, for a variant is named ``none``."""
    return pd.read_csv(source, keep_default_na=False, na_values=[""])


def recorded_table(directory: Path, name: str) -> pd.DataFrame:
    """A table of a recorded folder, once its files are found to be those of its manifest.

    Raises:
        ValueError: as :func:`read_manifest`.
    """
    read_manifest(directory)
    return read_table(directory / name)


def as_written(table: pd.DataFrame) -> pd.DataFrame:
    """A table as it is after being written and read back: six significant digits."""
    return read_table(io.StringIO(_as_text(table)))


def _as_text(table: pd.DataFrame) -> str:
    return table.to_csv(index=False, float_format=FLOAT_FORMAT)


def add_to_manifest(directory: Path, **fields: Any) -> None:
    """Add fields to a manifest and seal it anew, once its files are found to be those it names.

    Raises:
        ValueError: a file is missing or changed.
    """
    manifest = json.loads((directory / MANIFEST).read_bytes()) | fields
    _check_files(directory, manifest)
    replace_file(directory / MANIFEST, sealed(manifest))
