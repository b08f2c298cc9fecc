"""Dumps of rollouts from CSV, JSON lines and parquet; one row a token or one row a sequence."""

from __future__ import annotations

import csv
import gzip
import warnings
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pandas as pd

from analysis.errors import Refused
from analysis.experiments.diagnosis.columns import assemble, canonical
from analysis.experiments.diagnosis.folders import join
from analysis.experiments.diagnosis.json_lines import read_json_lines
from analysis.experiments.diagnosis.schema import Rollouts

FORMATS = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz", ".parquet")


def read_rollouts(path: Path) -> Rollouts:
    """The rollouts of a file, whose ending says the format, or of all such files in a folder.

    Raises:
        Refused: no such file, another format, an unreadable or empty file, or a bad row: one line
            naming file, row and column. Rows are numbered as lines of the file.
    """
    name = path.name.lower()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.lower().endswith(FORMATS))
        if not files:
            raise Refused(f"{path}: holds no dump; give one of {', '.join(FORMATS)}")
        return join({file: read_rollouts(file) for file in files})
    if not path.is_file():
        raise Refused(f"{path}: no such file")
    if not path.stat().st_size:
        raise Refused(f"{path}: is empty; dump at least one sequence")
    try:
        if name.endswith((".csv", ".csv.gz")):
            return assemble(_read_csv(path), str(path), lambda row: f"line {row + 2}")
        if name.endswith((".jsonl", ".jsonl.gz")):
            with _open(path) as file:
                return _assemble_nested(read_json_lines(file, path), str(path))
        if name.endswith(".parquet"):
            return _assemble_nested(_read_parquet(path), str(path))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: cannot be read ({error})") from None
    raise Refused(f"{path}: unknown format; give one of {', '.join(FORMATS)}")


def _open(path: Path) -> TextIO:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def _read_csv(path: Path) -> dict[str, np.ndarray]:
    with _open(path) as file:
        header = next(csv.reader(file), [])
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise Refused(f"{path}: column {twice[0]!r} stands twice in the first line")
        if len(header) == 1 and set(header[0]) & set(";\t|"):
            raise Refused(f"{path}: has one column, {header[0][:40]!r}; separate by commas")
        try:
            canonical(header)
        except Refused as refusal:
            raise Refused(f"{path}: {refusal}") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row too long loses data
            frame = pd.read_csv(path, low_memory=False, index_col=False, encoding="utf-8-sig")
    except pd.errors.EmptyDataError:
        raise Refused(f"{path}: holds no rows; dump at least one sequence") from None
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise Refused(f"{path}: is no regular CSV ({str(error).strip()})") from None
    return {str(name): frame[name].to_numpy() for name in frame.columns}


def _read_parquet(path: Path) -> dict[str, Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise Refused(
            f"{path}: parquet needs pyarrow: pip install 'kl-term[diagnose]', or dump .jsonl"
        ) from None
    from pyarrow.lib import ArrowException

    try:
        table = parquet.read_table(path)
    except ArrowException as error:
        raise Refused(f"{path}: is no readable parquet ({str(error).splitlines()[0]})") from None
    if not table.num_rows:
        raise Refused(f"{path}: holds no rows; dump at least one sequence")
    return {name: table.column(name).to_pandas().to_numpy() for name in table.column_names}


def _assemble_nested(table: dict[str, Any], label: str) -> Rollouts:
    """One row a token, or one row a sequence with lists; then a row is its own sequence."""
    own = {} if _has_sequence(table) else {"sequence": np.arange(_rows(table))}
    try:
        chosen, _ = canonical([*table, *own])
    except Refused as refusal:
        raise Refused(f"{label}: {refusal}") from None
    logp = table[chosen["logp"]]
    if not isinstance(_first(logp), np.ndarray | list):
        if own:
            raise Refused(f"{label}: column sequence is missing: say which tokens belong together")
        return assemble(table, label, lambda row: f"line {row + 1}")
    flat = _explode(table | own, chosen, label)
    ends = np.cumsum([len(value) for value in logp])

    def place(row: int) -> str:
        line = int(np.searchsorted(ends, row, side="right"))
        return f"line {line + 1}, token {row - (ends[line - 1] if line else 0) + 1}"

    return assemble(flat, label, place)


def _rows(table: dict[str, Any]) -> int:
    return len(next(iter(table.values())))


def _has_sequence(table: dict[str, Any]) -> bool:
    try:
        canonical(list(table))
    except Refused as refusal:
        return "column sequence" not in str(refusal)
    return True


def _first(values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _explode(table: dict[str, Any], chosen: dict[str, str], label: str) -> dict[str, np.ndarray]:
    logp = table[chosen["logp"]]
    for row, value in enumerate(logp, start=1):
        if not isinstance(value, np.ndarray | list):
            raise Refused(f"{label}: line {row}, column logp: a list was expected, as in line 1")
    lengths = np.array([len(value) for value in logp])
    flat: dict[str, np.ndarray] = {}
    flat["position"] = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    for name, original in chosen.items():
        flat[name] = _spread(table[original], lengths, name, label)
    for original in table.keys() - set(chosen.values()):
        flat[original] = np.zeros(int(lengths.sum()))  # named as ignored, never read
    return flat


def _spread(values: Any, lengths: np.ndarray, name: str, label: str) -> np.ndarray:
    """A column of lists end to end, or a column of one value a sequence repeated."""
    listed = [isinstance(value, np.ndarray | list) for value in values]
    if not any(listed):
        return np.repeat(np.asarray(values), lengths)
    parts = []
    for row, (value, length) in enumerate(zip(values, lengths, strict=True), start=1):
        if not isinstance(value, np.ndarray | list):
            parts.append(np.full(length, np.nan if value is None else value, dtype=object))
        elif len(value) != length:
            raise Refused(
                f"{label}: line {row}, column {name}: {len(value)} values, but logp has {length}"
            )
        else:
            parts.append(np.asarray(value))
    return np.concatenate(parts)
