"""Dumps as parquet, read a column at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kl_term.diagnosis.budgets import check_bytes, check_columns, check_rows
from kl_term.diagnosis.formats.nested import LazyColumns, assemble_nested
from kl_term.diagnosis.schema import Rollouts
from kl_term.errors import UserError


def read_parquet(path: Path) -> Rollouts:
    """The rollouts of a parquet file: one row a token, or one row a sequence with lists.

    Raises:
        UserError: pyarrow is not installed; no readable file, no rows, or a bad one.
    """
    return assemble_nested(_columns_of(path), str(path))


def _columns_of(path: Path) -> Mapping[str, Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(
            f"{path}: parquet needs pyarrow: pip install 'kl-term[diagnose]', or dump .jsonl"
        ) from None
    from pyarrow.lib import ArrowException

    try:
        file = parquet.ParquetFile(path)
    except ArrowException as error:
        raise UserError(f"{path}: is no readable parquet ({str(error).splitlines()[0]})") from None
    if not file.metadata.num_rows:
        raise UserError(f"{path}: holds no rows; dump at least one sequence")
    names = file.schema_arrow.names
    check_columns(names, str(path))
    groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
    check_bytes(sum(group.total_byte_size for group in groups), str(path))
    columns = range(file.metadata.num_columns)
    check_rows(max(sum(g.column(c).num_values for g in groups) for c in columns), str(path))
    return LazyColumns({name: partial(_parquet_column, file, name) for name in names})


def _parquet_column(file: Any, name: str) -> np.ndarray:
    """Plain values, or an array of arrays."""
    import pyarrow

    column = file.read(columns=[name], use_threads=False).column(name).combine_chunks()
    pyarrow.default_memory_pool().release_unused()
    if not pyarrow.types.is_list(column.type):
        return _as_numpy(column)
    offsets, values = _as_numpy(column.offsets), _as_numpy(column.values)
    rows = np.empty(len(column), dtype=object)
    for row, (first, end) in enumerate(pairwise(offsets)):
        rows[row] = values[first:end]
    if column.null_count:
        rows[_as_numpy(column.is_null())] = None
    return rows


def _as_numpy(array: Any) -> np.ndarray:
    """An arrow array; of plain numbers without pandas, which its own way to numpy imports."""
    if array.null_count == 0 and str(array.type).startswith(("float", "double", "int", "uint")):
        return np.from_dlpack(array)
    return array.to_numpy(zero_copy_only=False)
