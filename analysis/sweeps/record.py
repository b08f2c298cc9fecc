"""What was trained or computed here, as a recording."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.records.language import PopulationConfig
from analysis.records.manifests import write_folder
from analysis.records.preset import Preset
from analysis.records.provenance import Provenance, merged
from analysis.records.recording import Recording, save
from analysis.records.run_record import RunRecord
from analysis.records.tidy import RUN_COLUMNS, final
from analysis.sweeps.provenance import current_provenance
from analysis.sweeps.store import StoredRun, run_record


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


def tidy(record: RunRecord) -> pd.DataFrame:
    """One row per run and logging window, runs in their order."""
    frames, names = [], record.config.logs
    for row, run in enumerate(record.runs):
        variant = run.variant
        axes = {f"kl_{name}": value for name, value in variant.kl.at_one_state.items()}
        fields = {"variant": variant.name, **axes, "beta": variant.beta, "seed": run.seed}
        values = {name: record.metrics[name][:, row] for name in names}
        frames.append(pd.DataFrame({**fields, "update": record.updates, **values}))
    return pd.concat(frames, ignore_index=True)[[*RUN_COLUMNS, "update", *names]]


def ended(record: RunRecord) -> pd.DataFrame:
    """One row per run: its columns, and the ``FINAL_METRICS`` where the runs measured them."""
    runs = tidy(record).drop_duplicates([*RUN_COLUMNS])[[*RUN_COLUMNS]]
    return runs.reset_index(drop=True).assign(**record.final)


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


def record_sweep(preset: Preset, stored: Sequence[StoredRun], directory: Path) -> None:
    """Write a finished sweep to a folder, as the book's recorded results."""
    record = run_record(stored)
    trained = of_records(preset, [record], merged([one.provenance for one in stored]))
    save(trained, directory)
    print(f"recorded in {directory}", file=sys.stderr)
