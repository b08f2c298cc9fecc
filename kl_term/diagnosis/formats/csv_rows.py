"""Dumps as CSV: one row a token, or one row a sequence with lists in its cells."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path

import numpy as np

from kl_term.diagnosis.budgets import check_columns, check_rows, open_text
from kl_term.diagnosis.columns import assemble
from kl_term.diagnosis.formats.listed import holds_lists, parsed_lists
from kl_term.diagnosis.formats.nested import assemble_nested
from kl_term.diagnosis.names import canonical
from kl_term.diagnosis.schema import Rollouts
from kl_term.errors import UserError

#: Of a CSV, parsed at a time.
CSV_ROWS = 50_000


def read_csv(path: Path) -> Rollouts:
    """The rollouts of a CSV file, packed or not.

    Raises:
        UserError: no regular table, no rows, or a bad one.
    """
    table = _read_table(path)
    if holds_lists(table):
        return assemble_nested(parsed_lists(table, str(path)), str(path), first=2)
    try:
        return assemble(table, str(path), lambda row: f"line {row + 2}")
    except UserError:
        _refuse_torn_line(path)
        raise


def _read_table(path: Path) -> dict[str, np.ndarray]:
    import pandas as pd

    with open_text(path) as file:
        try:
            header = next(csv.reader(file), [])
            nested = "[" in file.readline()
        except csv.Error as error:
            raise UserError(f"{path}: is no regular CSV ({error})") from None
        check_columns(header, str(path))
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise UserError(f"{path}: column {twice[0]!r} stands twice in the first line")
        if len(header) == 1 and set(header[0]) & set(";\t|"):
            raise UserError(f"{path}: has one column, {header[0][:40]!r}; separate by commas")
    if not nested:
        try:
            canonical(header)
        except UserError as refusal:
            raise UserError(f"{path}: {refusal}") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row too long loses data
            columns = _by_blocks(path) or _whole(path)
    except pd.errors.EmptyDataError:
        raise UserError(f"{path}: holds no rows; dump at least one sequence") from None
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise UserError(f"{path}: is no regular CSV ({str(error).strip()})") from None
    check_rows(len(next(iter(columns.values()))), str(path))
    return columns


def _by_blocks(path: Path) -> dict[str, np.ndarray] | None:
    """The columns of a CSV, whose text is not held as a whole.

    None where a block has a column that is not of numbers: its type depends on the whole of it.
    """
    import pandas as pd

    columns: dict[str, _Growing] = {}
    with (
        open_text(path) as file,
        pd.read_csv(file, low_memory=False, index_col=False, chunksize=CSV_ROWS) as frames,
    ):
        for frame in frames:
            if not all(kind.kind in "if" for kind in frame.dtypes):
                return None
            for name in frame.columns:
                columns.setdefault(str(name), _Growing()).append(frame[name].to_numpy())
    return {name: column.end() for name, column in columns.items()}


class _Growing:
    """An array that blocks are appended to: blocks and their whole are never held together.

    What is reserved and not yet written takes no memory.
    """

    def __init__(self) -> None:
        self._size, self._array = 0, np.empty(0, np.int64)

    def append(self, values: np.ndarray) -> None:
        """Behind what is there; whole numbers become floats where a later block has floats."""
        size, kind = self._size + len(values), np.result_type(self._array, values)
        if size > len(self._array) or kind != self._array.dtype:
            larger = np.empty(max(2 * len(self._array), size), kind)
            larger[: self._size] = self._array[: self._size]
            self._array = larger
        self._array[self._size : size] = values
        self._size = size

    def end(self) -> np.ndarray:
        """All of it, and nothing reserved."""
        self._array.resize(self._size, refcheck=False)
        return self._array


def _whole(path: Path) -> dict[str, np.ndarray]:
    import pandas as pd

    with open_text(path) as file:
        frame = pd.read_csv(file, low_memory=False, index_col=False)
    return {str(name): frame[name].to_numpy() for name in frame.columns}


def _refuse_torn_line(path: Path) -> None:
    """What pandas takes for empty cells."""
    with open_text(path) as file:
        lines = csv.reader(file)
        header = next(lines)
        for line in lines:
            if 0 < len(line) < len(header):
                raise UserError(
                    f"{path}: line {lines.line_num} has {len(line)} of {len(header)} columns; "
                    "delete it if a killed process tore it"
                )
