"""What a store holds, as a table: a row for each configuration, arm and beta."""

from __future__ import annotations

import pandas as pd

from analysis.experiments.ablations.presets import Preset
from analysis.experiments.ablations.source import source_of
from analysis.experiments.sweeps.sealed import canonical
from analysis.experiments.sweeps.store import MemberRecord, MemberSpec, Store
from analysis.files import sha256_bytes

COLUMNS = ("config", "arm", "beta", "updates", "seeds")
COUNTS = ("finished", "diverged", "stale", "missing")


def inventory(store: Store, preset: Preset | None = None) -> pd.DataFrame:
    """How many members are stored, of a preset or of all.

    Args:
        store: the store.
        preset: list its members only, missing ones included.

    Returns:
        Columns ``config`` (a hash of what the members share), ``arm``, ``beta``, ``updates`` and
        ``seeds``, then counts: ``finished``, ``diverged`` among them, ``stale`` (stored, but of an
        older source) and ``missing`` (neither).
    """
    records = [stored.record for stored in store.contents() if stored.record is not None]
    one_of_each = {type(record.spec.config): record.spec.config for record in records}
    sources = {kind: source_of(config) for kind, config in one_of_each.items()}
    states: dict[MemberSpec, str] = {}
    for record in records:
        state = _state(record, sources[type(record.spec.config)])
        if state != "stale" or record.spec not in states:
            states[record.spec] = state
    if preset is not None:
        specs = [MemberSpec(config=preset.config, member=member) for member in preset.members]
        states = {spec: states.get(spec, "missing") for spec in specs}
    table = pd.DataFrame(
        [_row(spec, state) for spec, state in states.items()], columns=[*COLUMNS, "state"]
    )
    if table.empty:
        return pd.DataFrame(columns=[*COLUMNS, *COUNTS])
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
    return [f"{s.path}: {s.damage}" for s in store.contents() if s.record is None]


def _state(record: MemberRecord, source: str) -> str:
    if record.stamp.source != source:
        return "stale"
    return "finished" if record.failure is None else "diverged"


def _row(spec: MemberSpec, state: str) -> dict[str, object]:
    arm = spec.member.arm
    return {
        "config": sha256_bytes(canonical(spec.config))[:8],
        "arm": arm.name,
        "beta": arm.beta,
        "updates": spec.config.updates,
        "seeds": spec.member.seed,
        "state": state,
    }
