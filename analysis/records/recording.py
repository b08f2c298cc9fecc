"""A recording: a trained population as tables in a folder, with a manifest of their hashes.

``curves.csv`` holds the tidy curves, ``final.csv`` one row per run, both with six significant
digits; for the manifest see :mod:`analysis.records.manifests`. ``analysis sweep NAME --record
FOLDER`` makes one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from pydantic import ValidationError

from analysis.records.config import TrainConfig
from analysis.records.manifests import (
    MANIFEST,
    RESULTS,
    manifest_of,
    read_manifest,
    read_table,
    write_folder,
)
from analysis.records.metrics import KNOWN_METRICS, METRICS
from analysis.records.preset import Preset
from analysis.records.statistics import start_of
from analysis.records.tidy import RUN_COLUMNS


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


def folder_of(name: str) -> Path:
    """Where a CPU recording lies: in the folder of that name, or the first of that preset."""
    named = RESULTS / f"{name}_cpu"
    if named.is_dir():
        return named
    return next((path for path in sorted(RESULTS.glob("*")) if _is_of(path, name)), named)


def _is_of(folder: Path, preset: str) -> bool:
    return (folder / MANIFEST).is_file() and manifest_of(folder).get("preset") == preset


def save(recording: Recording, directory: Path) -> None:
    """Write a recording to ``directory``, replacing what it held."""
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


def with_others(recording: Recording) -> Recording:
    """The recording, and the runs on its seeds of what it was recorded beside, in turn.

    Raises:
        ValueError: they were trained with another configuration.
    """
    beside = recording.preset.beside
    if beside is None:
        return recording
    folder = folder_of(beside.name)
    others = with_others(load(folder))
    if others.preset.config != recording.preset.config:
        raise ValueError(
            f"{recording.preset.name} and {folder} were trained with different configurations: "
            f"record {recording.preset.name} with that of {beside.name}"
        )

    def both(table: pd.DataFrame, own: pd.DataFrame) -> pd.DataFrame:
        return pd.concat(
            [table[table["seed"].isin(recording.preset.seeds)], own], ignore_index=True
        )

    return recording._replace(
        curves=both(others.curves, recording.curves), finals=both(others.finals, recording.finals)
    )


def by_start(recording: Recording) -> Recording:
    """The recording with one row a start in place of its seeds, whose mean it is.

    ``seed`` becomes the start's number. What has one start, or a pretrained one, stays as it is.
    """
    config = recording.preset.config
    starts = config.start.count if isinstance(config, TrainConfig) else 1
    if starts == 1:
        return recording

    def means(table: pd.DataFrame) -> pd.DataFrame:
        keys = [name for name in (*RUN_COLUMNS, "update") if name in table]
        of_start = table.assign(seed=start_of(table["seed"], starts))
        measured = [name for name in KNOWN_METRICS if name in table]
        return of_start.groupby(keys, sort=False, as_index=False)[measured].mean()

    return recording._replace(curves=means(recording.curves), finals=means(recording.finals))


def compared(
    curves: pd.DataFrame, again: pd.DataFrame, metrics: Iterable[str] = tuple(METRICS)
) -> pd.DataFrame:
    """Tidy curves of some runs trained again, beside the recorded ones.

    Args:
        curves, again: of the runs, with ``update``.
        metrics: columns of both.

    Returns:
        One row per run, window and metric of ``again`` that either has measured: ``variant``,
        ``beta``, ``seed``, ``update``, ``metric``, ``recorded``, ``again`` and ``difference``, its
        absolute value. A number that only one of them has is NaN in the other.
    """
    keys = ["variant", "beta", "seed", "update"]
    tables = [
        table.astype({"beta": float}).melt(keys, list(metrics), "metric")
        for table in (curves, again)
    ]
    both = tables[0].merge(
        tables[1], how="right", on=[*keys, "metric"], suffixes=("_recorded", "_again")
    )
    both = both.rename(columns={"value_recorded": "recorded", "value_again": "again"})
    both = both.dropna(subset=["recorded", "again"], how="all").reset_index(drop=True)
    both["difference"] = (both["recorded"] - both["again"]).abs()
    return both
