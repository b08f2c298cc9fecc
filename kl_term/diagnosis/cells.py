"""The cells of one column: numbers, log-probs, masks and names, or one line that refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kl_term.diagnosis.names import LOG_PROBS
from kl_term.errors import UserError

#: float32 log-softmax of a certain token can come out this much above zero; more is no rounding.
ROUNDING_ABOVE_ZERO = 1e-3
#: No log-softmax of a model's logits reaches this; what masks and gaps are filled with does: -1e4,
#: or -9999, where vLLM's server clamps.
LOWEST = -1e3
#: Of other floats: sums of products of squares must stay finite.
LARGEST = 1e60

#: How messages name the row of an index.
Place = Callable[[int], str]


class Rows(NamedTuple):
    """The rows of a table: which count, and how messages name them."""

    counted: np.ndarray
    place: Place

    def refuse(self, bad: np.ndarray, name: str, why: Callable[[int], str]) -> None:
        """Name the first counted row that offends in a column, and why it does."""
        bad = bad & self.counted
        if bad.any():
            row = int(bad.argmax())
            raise UserError(f"{self.place(row)}, column {name}: {why(row)}")


def empty(values: Any) -> np.ndarray:
    """Which cells hold nothing."""
    array = np.asarray(values)
    if array.dtype.kind in "biu":
        return np.zeros(len(array), bool)
    if array.dtype.kind == "f":
        return np.isnan(array)
    import pandas as pd  # text only: a dump of numbers is read without it

    return pd.isna(array)


def read_numbers(values: Any, name: str, rows: Rows) -> np.ndarray:
    """Floats; NaN where the cell is empty. Text is refused wherever it stands and counts."""
    array = np.asarray(values)
    if array.dtype.kind in "fiu":
        numbers = array.astype(np.float64, copy=False)
    else:
        import pandas as pd

        numbers = pd.to_numeric(pd.Series(array), errors="coerce").to_numpy(np.float64)
        text = rows.counted & np.isnan(numbers) & ~pd.isna(array)
        text &= np.array([str(v).strip().lower() != "nan" for v in array]) if text.any() else text
        rows.refuse(text, name, lambda row: f"{array[row]!r} is no number")
    if name not in LOG_PROBS:
        large = np.abs(numbers) > LARGEST
        rows.refuse(np.isnan(numbers), name, lambda row: "empty or NaN; fill or drop the column")
        rows.refuse(np.isinf(numbers), name, lambda row: f"{numbers[row]} is not finite")
        rows.refuse(large, name, lambda row: f"{numbers[row]:.6g} is too large to be squared")
    return numbers


def check_log_probs(values: np.ndarray, name: str, rows: Rows) -> None:
    """Refuse counted numbers that no log-prob is, and guess what they are."""
    counted = values[rows.counted]
    guess = ""
    if (counted >= 0).all():
        guess = "; all are: was the sign dropped?"
        if (counted <= 1).all():
            guess = "; all are: probabilities? take their logarithm"

    def such(bad: np.ndarray) -> str:
        return f"{int((bad & rows.counted).sum())} such rows"

    no_number, high, low = ~np.isfinite(values), values > ROUNDING_ABOVE_ZERO, values <= LOWEST
    lost = f"no finite log-probability ({such(no_number)}); mask the token (mask 0) or fix the run"
    positive = f"above 0, so no log-probability ({such(high)}{guess})"
    filled = f"a mask's fill value and no log-probability ({such(low)}); mask the token (mask 0)"
    rows.refuse(no_number, name, lambda row: f"{values[row]} is {lost}")
    rows.refuse(high, name, lambda row: f"{values[row]:.6g} is {positive}")
    rows.refuse(low, name, lambda row: f"{values[row]:.6g} is {filled}")


def read_integers(values: Any, name: str, rows: Rows) -> np.ndarray:
    """Whole numbers; zero where a row does not count."""
    numbers = read_numbers(values, name, rows)
    wrong, large = numbers != np.floor(numbers), np.abs(numbers) >= 2.0**53
    rows.refuse(wrong, name, lambda row: f"{numbers[row]} is no whole number")
    rows.refuse(large, name, lambda row: f"{numbers[row]:.6g} is too large for a whole number")
    kept = np.where(rows.counted, numbers, 0)
    return kept.astype(np.int32 if np.abs(kept).max() < 2**31 else np.int64)


def read_mask(values: Any, rows: Rows) -> np.ndarray:
    """Which rows count, of 1 and 0 or their words."""
    array = np.asarray(values)
    if array.dtype == bool:
        return array
    if array.dtype.kind in "fiu":
        numbers = array.astype(np.float64)
    else:
        import pandas as pd

        words = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}
        text = pd.Series(array).astype(str).str.strip().str.lower()
        numbers = text.map(words).to_numpy(np.float64)
    meant = "neither 0 nor 1 (true and false are read too; 1 = counted)"
    wrong = ~np.isin(numbers, (0.0, 1.0))

    def why(row: int) -> str:
        cell = array[row : row + 1]
        if empty(cell)[0]:
            return f"an empty cell is {meant}; is the file cut off here?"
        return f"{cell.tolist()[0]!r} is {meant}"

    rows.refuse(wrong, "mask", why)
    return numbers == 1.0


def read_sequences(
    values: Any, step: np.ndarray | None, rows: Rows
) -> tuple[np.ndarray, np.ndarray]:
    """A code a row and the name of each code; the same id at another step is another sequence."""
    array = np.asarray(values)
    rows.refuse(empty(array), "sequence", lambda row: "empty")
    if array.dtype == object:
        odd = np.array([isinstance(value, (dict, list)) for value in array])
        rows.refuse(odd, "sequence", lambda row: f"{array[row]!r:.40} is no name")
    codes, names = _codes(array)
    if step is None:
        return codes, names
    both, values_of = _codes(codes + step.astype(np.int64) * max(1, len(names)))
    labels = [f"{names[pair % len(names)]} (step {pair // len(names)})" for pair in values_of]
    return both, np.asarray(labels, dtype=object)


def _codes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes from 0 in the order in which values first appear, and the value of each."""
    if values.dtype.kind in "iu":
        jumps = np.diff(values)
        if (jumps >= 0).all():  # as most dumps are
            codes = np.concatenate([[0], np.cumsum(jumps > 0)])
            return codes, values[np.flatnonzero(np.diff(codes, prepend=-1))]
    import pandas as pd

    codes, names = pd.factorize(values)
    return codes.astype(np.int64), np.asarray(names)


def read_groups(values: Any, rows: Rows) -> np.ndarray:
    """A number a row: the name itself where all are whole numbers, else a hash of it as text."""
    array = np.asarray(values)
    rows.refuse(empty(array), "group", lambda row: "empty")
    if array.dtype.kind in "iu":
        return array.astype(np.int64)
    if array.dtype.kind == "f":
        kept = np.where(rows.counted, array, 0.0)
        if (kept == np.floor(kept)).all() and np.abs(kept).max() < 2.0**53:
            return kept.astype(np.int64)
    import pandas as pd

    codes, names = pd.factorize(array)
    hashes = pd.util.hash_array(np.asarray(names).astype(str).astype(object)).view(np.int64)
    return np.where(codes < 0, 0, hashes[codes])
