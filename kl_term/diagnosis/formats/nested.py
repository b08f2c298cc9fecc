"""One row a sequence, with lists: made into one row a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from kl_term.diagnosis.budgets import check_rows
from kl_term.diagnosis.columns import assemble
from kl_term.diagnosis.names import NAMES, canonical
from kl_term.diagnosis.schema import Rollouts
from kl_term.errors import UserError


class LazyColumns(Mapping[str, Any]):
    """Columns of a table, each made when it is asked for: few are held at a time."""

    def __init__(self, made: dict[str, Callable[[], np.ndarray]]) -> None:
        self._made = made

    def __getitem__(self, name: str) -> np.ndarray:
        return self._made[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def assemble_nested(table: Mapping[str, Any], label: str, first: int = 1) -> Rollouts:
    """One row a token, or one row a sequence with lists; then a row is its own sequence.

    ``first`` is the number of the line of the first row.
    """
    named = {"sequence", *NAMES["sequence"]}
    own = () if any(name.strip().lower() in named for name in table) else ("sequence",)
    try:
        chosen, _ = canonical([*table, *own])
    except UserError as refusal:
        raise UserError(f"{label}: {refusal}") from None
    logp = table[chosen["logp"]]
    if not isinstance(_first(logp), np.ndarray | list):
        if own:
            raise UserError(
                f"{label}: column sequence is missing: say which tokens belong together"
            )
        return assemble(table, label, lambda row: f"line {row + first}")
    lengths = _lengths(logp, label, first)
    check_rows(int(lengths.sum()), label)
    del logp
    ends = np.cumsum(lengths)

    def place(row: int) -> str:
        line = int(np.searchsorted(ends, row, side="right"))
        return f"line {line + first}, token {row - (ends - lengths)[line] + 1}"

    return assemble(_spread_columns(table, chosen, lengths, first), label, place)


def _first(values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _lengths(logp: Any, label: str, first: int) -> np.ndarray:
    for row, value in enumerate(logp, start=first):
        if not isinstance(value, np.ndarray | list):
            raise UserError(
                f"{label}: line {row}, column logp: a list was expected, as in line {first}"
            )
    return np.array([len(value) for value in logp])


def _spread_columns(
    table: Mapping[str, Any], chosen: dict[str, str], lengths: np.ndarray, line: int
) -> LazyColumns:
    """By their canonical names, one row a token; with those that are ignored, and never read."""
    first, names = np.cumsum(lengths) - lengths, list(table)
    row = partial(np.repeat, np.arange(len(lengths)), lengths)
    made: dict[str, Any] = dict.fromkeys(n for n in names if n not in chosen.values()) | {
        "position": lambda: np.arange(lengths.sum()) - np.repeat(first, lengths),
        "sequence": row,
    }
    made |= {
        name: lambda name=name, column=column: _spread(table[column], lengths, name, line)
        for name, column in chosen.items()
        if column in names
    }
    packed = chosen.get("sequence")
    if packed in names and any(isinstance(v, np.ndarray | list) for v in table[packed]):
        made["sequence"] = lambda: _numbered(
            row(), _spread(table[packed], lengths, "sequence", line)
        )
        if "position" not in chosen:
            del made["position"]  # counted from the start of each sequence, not of its row
    return LazyColumns(made)


def _numbered(row: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Numbers of the sequences of packed rows, which may count from zero in each."""
    _, codes = np.unique(inside.astype(str), return_inverse=True)
    return row * (codes.max() + 1) + codes.ravel()


def _spread(values: Any, lengths: np.ndarray, name: str, line: int) -> np.ndarray:
    """A column of lists end to end, or a column of one value a sequence repeated."""
    listed = [isinstance(value, np.ndarray | list) for value in values]
    if not any(listed):
        return np.repeat(np.asarray(values), lengths)
    parts = []
    for row, (value, length) in enumerate(zip(values, lengths, strict=True), start=line):
        if not isinstance(value, np.ndarray | list):
            parts.append(np.full(length, np.nan if value is None else value, dtype=object))
        elif len(value) != length:
            raise UserError(
                f"line {row}, column {name}: {len(value)} values, but logp has {length}"
            )
        else:
            parts.append(np.asarray(value))
    return np.concatenate(parts)
