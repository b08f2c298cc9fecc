"""What a store holds, as a table: a row for each configuration, variant and beta."""

from __future__ import annotations

import pandas as pd

from analysis.experiments.preset import Preset
from analysis.experiments.provenance import source_of
from analysis.experiments.store import Store, StoredRun, canonical, run_key
from analysis.files import sha256_bytes
from analysis.training.config import Run

COLUMNS = ("config", "variant", "beta", "updates", "seeds")
COUNTS = ("finished", "diverged", "stale", "missing")


def inventory(store: Store, preset: Preset | None = None) -> pd.DataFrame:
    """How many runs are stored, of a preset, missing ones included, or of all.

    Returns:
        Columns ``config`` (a hash of what the runs share), ``variant``, ``beta``, ``updates`` and
        ``seeds``, then counts: ``finished``, ``diverged`` among them, ``stale`` (stored, but of an
        older source) and ``missing`` (neither).
    """
    found = [file.run for file in store.contents() if file.run is not None]
    one_of_each = {type(stored.config): stored.config for stored in found}
    sources = {kind: source_of(config) for kind, config in one_of_each.items()}
    rows: dict[str, dict[str, object]] = {}
    for stored in found:
        key, state = run_key(stored.config, stored.run), _state(stored, sources)
        if state != "stale" or key not in rows:
            rows[key] = _row(stored.config, stored.run, state)
    if preset is not None:
        runs = {run_key(preset.config, run): run for run in preset.runs}
        absent = {key: _row(preset.config, run, "missing") for key, run in runs.items()}
        rows = {key: rows.get(key, row) for key, row in absent.items()}
    if not rows:
        return pd.DataFrame(columns=[*COLUMNS, *COUNTS])
    table = pd.DataFrame(list(rows.values()))
    counted = table.assign(**{name: table["state"] == name for name in COUNTS})
    counted["finished"] |= counted["diverged"]
    keys = [name for name in COLUMNS if name != "seeds"]
    grouped = counted.groupby(keys, sort=preset is None)
    sums = grouped[list(COUNTS)].sum()
    sums.insert(0, "seeds", grouped["seeds"].agg(seed_ranges))
    return sums.reset_index()


def seed_ranges(seeds: pd.Series) -> str:
    """Such as ``0-2, 7``."""
    numbers = sorted(seeds)
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def damage(store: Store) -> list[str]:
    """A line for each file that cannot be read."""
    return [f"{file.path}: {file.damage}" for file in store.contents() if file.run is None]


def _state(stored: StoredRun, sources: dict[type, str]) -> str:
    if stored.provenance.source != sources[type(stored.config)]:
        return "stale"
    return "finished" if stored.failure is None else "diverged"


def _row(config: object, run: Run, state: str) -> dict[str, object]:
    return {
        "config": sha256_bytes(canonical(config))[:8],
        "variant": run.variant.name,
        "beta": run.variant.beta,
        "updates": config.updates,
        "seeds": run.seed,
        "state": state,
    }
