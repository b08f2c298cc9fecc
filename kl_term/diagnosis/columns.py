"""Columns of a dump put together as `Rollouts`: fillers, order and duplicates.

What a column is called is read in :mod:`kl_term.diagnosis.names`, what its cells hold in
:mod:`kl_term.diagnosis.cells`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kl_term.diagnosis.cells import (
    LOWEST,
    Place,
    Rows,
    check_log_probs,
    empty,
    read_groups,
    read_integers,
    read_mask,
    read_numbers,
    read_sequences,
)
from kl_term.diagnosis.names import FLOATS, INTEGERS, LOG_PROBS, OPTIONAL, canonical
from kl_term.diagnosis.schema import Rollouts
from kl_term.errors import UserError

#: Nats from the trainer's log-prob, and shares of the counted tokens and of the whole numbers that
#: far off, which one value of the engine must have to be a filler.
FAR_FILLER, FEWEST_FILLERS, LEAST_FILLED, LEAST_ALIKE = 1.0, 3, 1e-3, 0.3

Columns = Mapping[str, Any]


def assemble(table: Columns, source: str, place: Place = lambda row: f"row {row + 1}") -> Rollouts:
    """Counted tokens of a table of equally long columns, one row a token.

    Args:
        table: column name -> values; a data frame too.
        source: how messages name the file.
        place: how messages name a row, by its index.

    Raises:
        UserError: one line naming the first offending row and its column.
    """
    try:
        return _assemble(table, place)
    except UserError as refusal:
        raise UserError(f"{source}: {refusal}") from None


def _assemble(table: Columns, place: Place) -> Rollouts:
    chosen, ignored = canonical(list(table))
    size = len(table[chosen["logp"]])
    if not size:
        raise UserError("holds no rows; dump at least one sequence")

    def present(*names: str) -> Iterator[tuple[str, Any]]:
        """Columns that are there, one at a time: a table may make them as they are asked for."""
        for name in names:
            if name in chosen:
                values = table[chosen[name]]
                if name not in ("old_logp", *OPTIONAL, "position") or not empty(values).all():
                    yield name, values

    rows = Rows(np.ones(size, bool), place)
    for _, values in present("mask"):
        rows = Rows(read_mask(values, rows), place)
    if not rows.counted.any():
        raise UserError("mask counts no token; True or 1 must mean counted")
    found = {
        name: read_numbers(values, name, rows) for name, values in present(*LOG_PROBS, *FLOATS)
    }
    unscored, filled, filler = _fill_unscored(found, rows.counted)
    for name in LOG_PROBS:
        if name in found:
            check_log_probs(found[name], name, rows)
    for name, values in present(*INTEGERS, "position"):
        found[name] = read_integers(values, name, rows)
    codes, names = read_sequences(table[chosen["sequence"]], found.get("step"), rows)
    given = found.pop("position", None)
    position = np.arange(size, dtype=np.int32) if given is None else given
    order = _order(codes, position, rows.counted)
    if given is not None and order is not None:  # in order, each position is after the one before
        _refuse_duplicates(codes, position, order, names, place)
    for name, values in present("group"):
        found[name] = read_groups(values, rows)
    found |= {"position": position, "code": codes}
    if order is not None:
        for name in found:
            found[name] = found[name][order]
    codes, placed = found.pop("code"), found.pop("position")
    starts = np.flatnonzero(np.diff(codes, prepend=codes[0] - 1))
    lengths = np.diff(starts, append=len(codes))
    return Rollouts(
        logp=found["logp"],
        old_logp=found.get("old_logp", found["logp"]),
        ref_logp=found["ref_logp"],
        sequence=np.repeat(np.arange(len(starts), dtype=np.int32), lengths),
        position=placed if given is not None else placed - np.repeat(placed[starts], lengths),
        **{name: found.get(name) for name in OPTIONAL},
        rows=size,
        has_old_logp="old_logp" in found,
        sequence_names=tuple(_text(names[code]) for code in codes[starts]),
        ignored={_text(name): near for name, near in ignored.items()},
        unscored=unscored,
        filled=filled,
        filler=filler,
    )


def _text(name: object) -> str:
    """As it can be written: JSON may hold half a character."""
    return str(name).encode(errors="replace").decode()


def _order(codes: np.ndarray, position: np.ndarray, counted: np.ndarray) -> np.ndarray | None:
    """The counted rows by sequence and position; None where these are all rows as they stand."""
    kept = None if counted.all() else np.flatnonzero(counted)
    if kept is not None:
        codes, position = codes[kept], position[kept]
    steps = np.diff(codes)
    if ((steps > 0) | ((steps == 0) & (np.diff(position) > 0))).all():
        return kept  # as most dumps are
    order = np.lexsort((position, codes))
    return order if kept is None else kept[order]


def _fill_unscored(numbers: dict[str, np.ndarray], counted: np.ndarray) -> tuple[int, int, float]:
    """Tokens that the inference engine could not score get the trainer's log-prob.

    Returns:
        How many these are (NaN, infinite, or a filler), how many of them held a filler, and which.
    """
    if "sampler_logp" not in numbers:
        return 0, 0, 0.0
    sampler, trainer = numbers["sampler_logp"], numbers.get("old_logp", numbers["logp"])
    fillers = (sampler <= LOWEST) & counted
    if not fillers.any():
        fillers = _one_value(sampler, trainer, counted)
    missing = np.isnan(sampler) | (sampler <= LOWEST) | fillers
    numbers["sampler_logp"] = np.where(missing, trainer, sampler)
    usual = float(np.median(sampler[fillers])) if fillers.any() else 0.0
    return int((missing & counted).sum()), int(fillers.sum()), usual


def _one_value(sampler: np.ndarray, trainer: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Where the engine has one whole number, far from what the trainer has there: 0.0, -1, -100."""
    far = counted & (np.abs(sampler - trainer) > FAR_FILLER) & (sampler == np.round(sampler))
    values, times = np.unique(sampler[far], return_counts=True)
    if not len(values):
        return far
    most = int(times.argmax())
    enough = max(FEWEST_FILLERS, LEAST_FILLED * counted.sum(), LEAST_ALIKE * far.sum())
    return far & (sampler == values[most]) & bool(times[most] >= enough)


def _refuse_duplicates(
    codes: np.ndarray, position: np.ndarray, rows: np.ndarray, names: np.ndarray, place: Place
) -> None:
    codes, position = codes[rows], position[rows]
    twice = (np.diff(codes) == 0) & (np.diff(position) == 0)
    if twice.any():
        at = int(twice.argmax())
        first, second = sorted((int(rows[at]), int(rows[at + 1])))
        raise UserError(
            f"{place(first)} and {place(second)}: sequence {names[codes[at]]}, "
            f"position {position[at]} twice ({int(twice.sum())} such pairs); "
            "give each sequence its own id (of packed rows sequence_ids), or add a step column"
        )
