"""A recording: a trained population as tables in a folder, with a manifest of their hashes.

``curves.csv`` holds the tidy curves, ``final.csv`` one row per run, both with six significant
digits; for the manifest see :mod:`analysis.experiments.manifests`. ``analysis sweep NAME --record
FOLDER`` makes one.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from pydantic import ValidationError

import analysis
from analysis.experiments.ablation import RUN_COLUMNS, ended, final, tidy, train
from analysis.experiments.environment import PopulationConfig, environment_of
from analysis.experiments.manifests import (
    MANIFEST,
    as_text,
    manifest_of,
    read_manifest,
    write_folder,
)
from analysis.experiments.preset import Preset
from analysis.experiments.provenance import Provenance, current_provenance
from analysis.experiments.statistics import start_of
from analysis.training.config import TrainConfig
from analysis.training.metrics import FINAL_METRICS, METRICS
from analysis.training.trainer import RunRecord

#: Where recorded folders lie.
RESULTS = Path(analysis.__path__[0]).parent / "results"


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
    ends = pd.concat([ended(record) for record in records], ignore_index=True)
    manifest = {
        "preset": preset.name,
        "seeds": list(preset.seeds),
        **provenance.model_dump(),
        "wall_seconds": round(sum(record.wall_seconds for record in records), 1),
        "failures": [failure._asdict() for record in records for failure in record.failures],
        "configuration": preset.model_dump(mode="json"),
    }
    finals = final(curves).merge(ends, how="left", on=[*RUN_COLUMNS], validate="one_to_one")
    return Recording(preset, curves, finals, manifest)


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
        measured = [name for name in (*METRICS, *FINAL_METRICS) if name in table]
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


def read_table(source: Path | io.StringIO) -> pd.DataFrame:
    """A table of a recorded folder: only an empty field is NaN, for a variant is named ``none``."""
    return pd.read_csv(source, keep_default_na=False, na_values=[""])


def record_tables(
    directory: Path,
    tables: Mapping[str, pd.DataFrame],
    config: PopulationConfig,
    *,
    preset: str,
    seeds: Sequence[int] = (),
    **fields: Any,
) -> None:
    """Record what was computed here, and is no population, under the source of ``config``'s runs.

    Args:
        tables: by file name.
        preset, seeds, fields: of the manifest.
    """
    made = current_provenance(config).model_dump()
    write_folder(directory, tables, {"preset": preset, "seeds": list(seeds), **made, **fields})


def recorded_table(directory: Path, name: str) -> pd.DataFrame:
    """A table of a recorded folder, once its files are found to be those of its manifest.

    Raises:
        ValueError: as :func:`read_manifest`.
    """
    read_manifest(directory)
    return read_table(directory / name)


def as_written(table: pd.DataFrame) -> pd.DataFrame:
    """A table as it is after being written and read back: six significant digits."""
    return read_table(io.StringIO(as_text(table)))
