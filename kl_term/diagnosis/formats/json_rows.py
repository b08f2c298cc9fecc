"""Dumps as JSON lines: an object a token, a sequence, or a batch of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from kl_term.diagnosis.budgets import json_lines, open_text
from kl_term.diagnosis.formats.listed import unbatched
from kl_term.diagnosis.formats.nested import assemble_nested
from kl_term.diagnosis.schema import Rollouts
from kl_term.errors import UserError


def read_json_lines(path: Path) -> Rollouts:
    """The rollouts of a file of JSON lines, packed or not.

    Raises:
        UserError: a line is no JSON object, or has other fields than the first; or a bad row.
    """
    with open_text(path) as file:
        return assemble_nested(_read_table(file, path), str(path))


def _read_table(file: TextIO, path: Path) -> dict[str, np.ndarray]:
    """Columns of a file with one JSON object a line, all with the same fields.

    Raises:
        UserError: a line is no JSON object, or has other fields than the first; or there are none.
    """
    columns: dict[str, list[Any]] = {}
    for number, row in unbatched(json_lines(file, str(path)), str(path)):
        columns = columns or {name: [] for name in row}
        for odd in sorted(row.keys() ^ columns.keys()):
            raise UserError(
                f"{path}: line {number} and the first line disagree on field {odd!r}; "
                "write every field in every line (null where there is none)"
            )
        for name, value in row.items():
            columns[name].append(_as_array(value) if isinstance(value, list) else value)
    if not columns:
        raise UserError(f"{path}: holds no rows; dump at least one sequence")
    return {name: _as_column(values) for name, values in columns.items()}


def _as_column(values: list[Any]) -> np.ndarray:
    """The values of one field as an array, of arrays where some were lists."""
    if any(isinstance(value, np.ndarray) for value in values):
        return np.fromiter(values, dtype=object)
    return np.array(values, dtype=bool) if {*map(type, values)} <= {bool} else _as_array(values)


def _as_array(values: list[Any]) -> np.ndarray:
    try:
        array = np.array(values)
    except (ValueError, OverflowError):  # lists of several lengths
        array = np.empty(0, dtype=object)
    if array.ndim == 1 and array.dtype.kind in "fiub":  # as most are
        return array.astype(np.float64, copy=False)
    types = {*map(type, values)}
    if types & {str, list, dict}:
        return np.fromiter(values, dtype=object)
    if type(None) in types:
        values = [np.nan if value is None else value for value in values]
    try:
        return np.array(values, dtype=np.float64)
    except OverflowError:  # an integer beyond the floats counts as infinite
        return np.array([_as_float(value) for value in values])


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
