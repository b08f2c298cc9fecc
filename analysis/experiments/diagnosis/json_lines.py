"""JSON lines as columns: parsed, checked and turned into arrays a few megabytes at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from analysis.errors import Refused

#: Characters held as Python objects at a time: bounds memory, not the file. Lines may be of one
#: token or of a sequence of thousands.
CHUNK = 4_000_000

Row = dict[str, Any]


def read_json_lines(file: TextIO, path: Path) -> dict[str, np.ndarray]:
    """Columns of a file with one JSON object a line, all with the same fields.

    Raises:
        Refused: a line is no JSON object, or has other fields than the first; or there are none.
    """
    pieces: dict[str, list[np.ndarray]] = {}
    for numbers, lines in _chunks(file):
        rows = _parsed_together(lines) or _parsed_singly(lines, numbers, path)
        pieces = pieces or {key: [] for key in rows[0]}
        _check_fields(rows, numbers, pieces, path)
        for key, parts in pieces.items():
            parts.append(_as_column(list(map(itemgetter(key), rows))))
    if not pieces:
        raise Refused(f"{path}: holds no rows; dump at least one sequence")
    return {
        key: np.concatenate([part.astype(object) for part in parts])
        if any(part.dtype == object for part in parts)
        else np.concatenate(parts)
        for key, parts in pieces.items()
    }


def _chunks(file: TextIO) -> Iterator[tuple[list[int], list[str]]]:
    """Lines that are not blank, with their numbers from 1."""
    numbers: list[int] = []
    lines: list[str] = []
    size = 0
    for number, line in enumerate(file, start=1):
        stripped = line.strip()
        if not stripped:
            continue
        numbers.append(number)
        lines.append(stripped)
        size += len(stripped)
        if size >= CHUNK:
            yield numbers, lines
            numbers, lines, size = [], [], 0
    if lines:
        yield numbers, lines


def _parsed_together(lines: list[str]) -> list[Row] | None:
    """The objects of all lines in one call, which is twice as fast; None if a line is none."""
    if not all(line[0] == "{" and line[-1] == "}" for line in lines):
        return None
    try:
        rows = json.loads(f"[{','.join(lines)}]")
    except ValueError:
        return None
    return rows if len(rows) == len(lines) and all(type(row) is dict for row in rows) else None


def _parsed_singly(lines: list[str], numbers: list[int], path: Path) -> list[Row]:
    rows = []
    for number, line in zip(numbers, lines, strict=True):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise Refused(
                f"{path}: line {number} is no JSON ({error}); delete it if a killed process tore it"
            ) from None
        if not isinstance(row, dict):
            raise Refused(f"{path}: line {number} is no JSON object")
        rows.append(row)
    return rows


def _check_fields(rows: list[Row], numbers: list[int], fields: dict[str, Any], path: Path) -> None:
    names = fields.keys()
    for number, row in zip(numbers, rows, strict=True):
        if row.keys() != names:
            odd = sorted(row.keys() ^ names)[0]
            raise Refused(
                f"{path}: line {number} and the first line disagree on field {odd!r}; "
                "write every field in every line (null where there is none)"
            )


def _as_column(values: list[Any]) -> np.ndarray:
    """Python values of one field as an array; lists become arrays within it."""
    types = set(map(type, values))
    if list in types:
        column = np.empty(len(values), dtype=object)
        for i, value in enumerate(values):
            column[i] = _as_array(value)
        return column
    if types & {str, dict}:
        return np.array(values, dtype=object)
    if types <= {bool}:
        return np.array(values, dtype=bool)
    if type(None) in types:
        values = [np.nan if value is None else value for value in values]
    return np.array(values, dtype=np.float64)


def _as_array(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    types = set(map(type, value))
    if types & {str, list, dict}:
        parts = np.empty(len(value), dtype=object)
        parts[:] = value
        return parts
    if type(None) in types:
        value = [np.nan if item is None else item for item in value]
    return np.array(value, dtype=np.float64)
