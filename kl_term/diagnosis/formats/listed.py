"""Lists where a table has cells, and a batch on a line: dumps as loops of one's own write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from kl_term.diagnosis.names import NAMES, is_known
from kl_term.errors import UserError

#: Around the numbers of a list that was written by way of its text.
_LIST = re.compile(r"\s*(?:tensor|array)?\(?\s*\[(.*)\]", re.DOTALL)
#: Columns with a value a token: a line on which one has lists of lists is a batch. Others may have
#: such a list a token, as the log-probs of the likeliest tokens.
_BY_TOKEN = {alias for name in ("logp", "old_logp") for alias in (name, *NAMES[name])}


#: What else Python and JSON write in a list of numbers.
_WORDS = {"true": "1", "false": "0", "none": "nan", "null": "nan"}


def holds_lists(table: Mapping[str, np.ndarray]) -> bool:
    """Whether the first row of a table of text has a list in a cell."""
    return any(_is_list(values[0]) for values in table.values() if len(values))


def parsed_lists(table: Mapping[str, np.ndarray], label: str) -> dict[str, np.ndarray]:
    """The columns, those with lists as arrays of arrays; such as are not read stay text.

    Commas or blanks separate numbers, as Python, JSON, numpy and torch write them.

    Raises:
        UserError: a cell is no list of numbers where the first one is, or was cut by numpy.
    """
    return {
        name: _parsed(values, f"{label}: column {name}")
        if _is_list(values[0]) and is_known(name)
        else values
        for name, values in table.items()
    }


def _is_list(cell: object) -> bool:
    return isinstance(cell, str) and _LIST.match(cell) is not None


def _parsed(values: np.ndarray, label: str) -> np.ndarray:
    rows = np.empty(len(values), dtype=object)
    for row, cell in enumerate(values):
        found = _LIST.match(cell) if isinstance(cell, str) else None
        if found is None:
            raise UserError(f"{label}, row {row + 1}: {cell!r:.40} is no list, as in row 1")
        if "..." in found[1]:
            raise UserError(
                f"{label}, row {row + 1}: the list was shortened to '...' when it was written: "
                "write values.tolist()"
            )
        numbers = [_WORDS.get(n.lower(), n) for n in found[1].replace(",", " ").split()]
        try:
            rows[row] = np.array(numbers, dtype=np.float64)
        except ValueError:
            wrong = next(number for number in numbers if not _is_number(number))
            raise UserError(f"{label}, row {row + 1}: {wrong[:40]!r} is no number") from None
    return rows


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def unbatched(
    lines: Iterable[tuple[int, dict[str, Any]]], label: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of lines; of one that holds a batch, lists of lists, one for each sequence.

    Raises:
        UserError: the lists of a batch are not of one length.
    """
    for number, row in lines:
        batched = [n for n, v in row.items() if n.strip().lower() in _BY_TOKEN and _is_batch(v)]
        if not batched:
            yield number, row
            continue
        size = len(row[batched[0]])
        for name, value in row.items():
            if isinstance(value, list) and len(value) != size:
                raise UserError(
                    f"{label}: line {number}, column {name}: {len(value)} sequences, but "
                    f"{batched[0]} has {size}"
                )
        for index in range(size):
            yield number, {n: v[index] if isinstance(v, list) else v for n, v in row.items()}


def _is_batch(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)
