"""Dumps as a user of a loop of his own, of TRL or of verl would have them, and what to say."""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.diagnosis.blind.loop import Array, Columns, Settings, run

# What the trainers call these columns; a loop of one's own uses the names asked for.
TRL = """logp per_token_logps old_logp old_per_token_logps ref_logp ref_per_token_logps
    sampler_logp sampling_per_token_logps mask completion_mask token completion_ids
    advantage advantages reward rewards entropy entropies group prompt_id step global_step"""
VERL = """old_logp old_log_probs ref_logp ref_log_prob sampler_logp rollout_log_probs
    mask response_mask token token_ids advantage advantages reward scores entropy entropys
    group uid"""
NAMES = {
    source: dict(zip(names.split()[::2], names.split()[1::2], strict=True))
    for source, names in {"plain": "", "trl": TRL, "verl": VERL}.items()
}
Edit = Callable[[Columns, np.random.Generator], None]


@dataclass(frozen=True)
class Dump:
    """A run, what is done to its columns, the format of its file and the user's options."""

    settings: Settings
    edit: Edit = lambda columns, rng: None
    form: str = "jsonl"
    options: str | None = None  # the user's; by default k3 in the loss, for verl none
    packed: str = ""  # "ids": with sequence_ids, "bare": without

    def command(self, path: Path) -> str:
        """The line that a user would type beside the file."""
        source = self.settings.source
        usual = "" if source == "verl" else "--estimator k3 --placement loss"
        options = usual if self.options is None else self.options
        return f"python -m kl_term diagnose {path.name} --framework {source} {options}".strip()

    def columns(self, seed: int) -> list[Columns]:
        """The columns of each step."""
        steps = run(replace(self.settings, seed=seed))
        rng = np.random.default_rng(seed + 1)
        for columns in steps:
            self.edit(columns, rng)
        return steps


def numbers(values: Array) -> list:
    """Seven decimals, None for NaN."""
    if values.dtype.kind != "f":
        return values.tolist()
    return [None if v != v else v for v in np.round(values.astype(float), 7).tolist()]


def completions(columns: Columns, source: str) -> list[dict]:
    """A record a completion, ending with its last counted token."""
    records = []
    for row, mask in enumerate(columns["mask"]):
        end = int(np.flatnonzero(mask).max(initial=0)) + 1
        record = {}
        for name, values in columns.items():
            named = NAMES[source].get(name, name)
            cut = values[row, :end] if values.ndim == 2 else values[row : row + 1]
            record[named] = numbers(cut) if values.ndim == 2 else numbers(cut)[0]
        records.append(record)
    return records


def pack(records: list[dict], size: int, ids: bool) -> list[dict]:
    """``size`` completions in each row, one behind another."""
    packed = []
    for start in range(0, len(records), size):
        joined: dict = {"sequence_ids": []} if ids else {}
        for index, record in enumerate(records[start : start + size]):
            length = max(len(v) for v in record.values() if isinstance(v, list))
            for name, value in record.items():
                values = value if isinstance(value, list) else [value] * length
                joined.setdefault(name, []).extend(values)
            if ids:
                joined["sequence_ids"] += [index] * length
        packed.append(joined)
    return packed


def write(dump: Dump, name: str, folder: Path, seed: int) -> Path:
    """The dump's file: JSON lines or CSV, or npz with all steps stacked."""
    seed = zlib.crc32(f"{seed} {name}".encode())
    steps = dump.columns(seed)
    source = dump.settings.source
    path = folder / f"{name}.{dump.form}"
    if dump.form == "npz":
        stacked = {k: np.concatenate([columns[k] for columns in steps]) for k in steps[0]}
        named: dict[str, Any] = {NAMES[source].get(k, k): v for k, v in stacked.items()}
        np.savez(path, **named)
        return path
    records = [record for columns in steps for record in completions(columns, source)]
    if dump.form == "csv":
        write_tokens(records, path)
        return path
    if dump.packed:
        records = pack(records, 4, dump.packed == "ids")
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_tokens(records: list[dict], path: Path) -> None:
    """CSV, a row a token."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sequence", "position", *records[0]])
        for sequence, record in enumerate(records):
            length = max(len(v) for v in record.values() if isinstance(v, list))
            lists = [v if isinstance(v, list) else [v] * length for v in record.values()]
            rows = zip(range(length), *lists, strict=True)
            writer.writerows([sequence, *row] for row in rows)


def drop(column: str) -> Edit:
    """Leave a column out."""
    return lambda columns, rng: columns.__delitem__(column)


def put(column: str, values: Callable[[Columns], Array]) -> Edit:
    """Make a column of the others."""
    return lambda columns, rng: columns.__setitem__(column, values(columns))


def fill(column: str, value: float, rows: float = 1.0, tokens: float = 1.0, after: int = 0) -> Edit:
    """Put ``value`` into a share of the rows and of their tokens, from a position on."""

    def edit(columns: Columns, rng: np.random.Generator) -> None:
        shape = columns[column].shape
        hit = (rng.random((shape[0], 1)) < rows) & (rng.random(shape) < tokens)
        hit[:, :after] = False
        columns[column] = np.where(hit, value, columns[column])

    return edit
