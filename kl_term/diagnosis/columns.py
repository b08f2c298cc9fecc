"""Columns of a dump, by any framework's names, checked row by row into `Rollouts`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from kl_term.diagnosis.schema import Rollouts
from kl_term.errors import UserError

#: Canonical column -> the names frameworks use for it.
NAMES: dict[str, tuple[str, ...]] = {
    "sequence": ("sequence_id", "seq_id", "sample_id", "sequence_ids", "seq_ids"),
    "position": ("token_position", "pos", "t", "position_ids"),
    "logp": (
        "per_token_logps",
        "log_probs",
        "log_prob",
        "logprobs",
        "logps",
        "curr_logprobs",  # NeMo-RL
        "trainer_logprobs",  # prime-rl
    ),
    "old_logp": (
        "old_per_token_logps",
        "old_log_probs",
        "old_log_prob",
        "old_action_log_probs",
        "action_log_probs",
        "prev_logprobs",  # NeMo-RL
        "prox_logp",  # AReaL
    ),
    "ref_logp": (
        "ref_per_token_logps",
        "ref_log_prob",
        "ref_log_probs",
        "base_action_log_probs",
        "reference_policy_logprobs",  # NeMo-RL
    ),
    "sampler_logp": (
        "sampling_per_token_logps",
        "rollout_log_probs",
        "rollout_logprobs",
        "generation_logprobs",  # NeMo-RL
        "inference_logprobs",  # prime-rl
    ),
    "mask": ("completion_mask", "response_mask", "action_mask", "loss_mask", "token_mask"),
    "entropy": ("entropies", "entropys"),
    "advantage": ("advantages",),
    "reward": ("rewards", "score", "scores", "token_level_scores"),
    "step": ("global_step", "iteration"),
    "group": ("group_id", "prompt_id", "uid"),
    "token": ("token_id", "token_ids", "completion_ids"),
    "kl_term": ("kl_loss", "kl_penalty"),
    "padding": ("left_padding", "prompt_padding"),
    "lag": ("lags", "weights_behind", "weight_lag", "staleness", "off_policy_steps"),
    "version": (
        "versions",  # AReaL
        "weight_version",
        "weight_versions",
        "policy_version",
        "model_version",
        "param_version",
    ),
}
REQUIRED = ("logp", "ref_logp", "sequence")
#: Where the sequences of packed rows end: tensors are cut there, a table names its sequences.
ENDS = ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seq_lens_q")
LOG_PROBS = ("logp", "old_logp", "ref_logp", "sampler_logp")
FLOATS = ("entropy", "advantage", "reward", "kl_term")
INTEGERS = ("step", "token", "padding", "lag", "version")
OPTIONAL = ("sampler_logp", *FLOATS, *INTEGERS, "group")

#: float32 log-softmax of a certain token can come out this much above zero; more is no rounding.
ROUNDING_ABOVE_ZERO = 1e-3
#: No log-softmax of a model's logits reaches this; what masks and gaps are filled with does: -1e4,
#: or -9999, where vLLM's server clamps.
LOWEST = -1e3
#: Nats from the trainer's log-prob, and shares of the counted tokens and of the whole numbers that
#: far off, which one value of the engine must have to be a filler.
FAR_FILLER, FEWEST_FILLERS, LEAST_FILLED, LEAST_ALIKE = 1.0, 3, 1e-3, 0.3
#: Of other floats: sums of products of squares must stay finite.
LARGEST = 1e60

_KNOWN = {alias: name for name, aliases in NAMES.items() for alias in (name, *aliases)}

Columns = Mapping[str, Any]
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


def canonical(columns: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Which column of a dump is which, and the unknown ones with the nearest known name.

    Raises:
        UserError: two columns mean the same, or a required one is missing.
    """
    chosen: dict[str, str] = {}
    ignored: dict[str, str] = {}
    known, given = _KNOWN, {column.strip().lower() for column in columns}
    if "old_action_log_probs" in given:
        known = known | {"action_log_probs": "logp"}  # as OpenRLHF calls the two
    if "prox_logp" in given:
        known = known | {"logprobs": "sampler_logp"}  # as AReaL calls what the engine reports
    for column in columns:
        if column.strip().lower() in ENDS:
            raise UserError(
                f"{column} says that rows hold several sequences: dump the sequence of each token "
                "instead, a column sequence_ids (kl_term.sequence_ids makes it)"
            )
        name = known.get(column.strip().lower())
        if name is None:
            near = difflib.get_close_matches(column.strip().lower(), _KNOWN, n=1)
            ignored[column] = near[0] if near else ""
        elif name in chosen:
            raise UserError(
                f"columns {chosen[name]!r} and {column!r} both mean {name}; drop or rename one"
            )
        else:
            chosen[name] = column
    if "logp" not in chosen and "old_logp" in chosen:
        chosen["logp"] = chosen["old_logp"]  # dumped before the update: the two are one
    for name in REQUIRED:
        if name not in chosen:
            hints = [column for column, near in ignored.items() if _KNOWN.get(near) == name]
            hint = f"; rename {hints[0]!r}?" if hints else ""
            aliases = ", ".join(NAMES[name])
            if name == "logp" and not hint:
                hint = "; a trainer's log has none: see kl-term diagnose --how-to-dump plain"
            raise UserError(f"column {name} is missing (also read: {aliases}){hint}")
    return chosen, ignored


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
                if name not in ("old_logp", *OPTIONAL, "position") or not _empty(values).all():
                    yield name, values

    rows = Rows(np.ones(size, bool), place)
    for _, values in present("mask"):
        rows = Rows(_mask(values, rows), place)
    if not rows.counted.any():
        raise UserError("mask counts no token; True or 1 must mean counted")
    found = {name: _numbers(values, name, rows) for name, values in present(*LOG_PROBS, *FLOATS)}
    unscored, filled, filler = _fill_unscored(found, rows.counted)
    for name in LOG_PROBS:
        if name in found:
            _check_log_probs(found[name], name, rows)
    for name, values in present(*INTEGERS, "position"):
        found[name] = _integers(values, name, rows)
    codes, names = _sequences(table[chosen["sequence"]], found.get("step"), rows)
    given = found.pop("position", None)
    position = np.arange(size, dtype=np.int32) if given is None else given
    order = _order(codes, position, rows.counted)
    if given is not None and order is not None:  # in order, each position is after the one before
        _refuse_duplicates(codes, position, order, names, place)
    for name, values in present("group"):
        found[name] = _groups(values, rows)
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


def _empty(values: Any) -> np.ndarray:
    """Which cells hold nothing."""
    array = np.asarray(values)
    if array.dtype.kind in "biu":
        return np.zeros(len(array), bool)
    if array.dtype.kind == "f":
        return np.isnan(array)
    import pandas as pd  # text only: a dump of numbers is read without it

    return pd.isna(array)


def _numbers(values: Any, name: str, rows: Rows) -> np.ndarray:
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


def _check_log_probs(values: np.ndarray, name: str, rows: Rows) -> None:
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


def _integers(values: Any, name: str, rows: Rows) -> np.ndarray:
    numbers = _numbers(values, name, rows)
    wrong, large = numbers != np.floor(numbers), np.abs(numbers) >= 2.0**53
    rows.refuse(wrong, name, lambda row: f"{numbers[row]} is no whole number")
    rows.refuse(large, name, lambda row: f"{numbers[row]:.6g} is too large for a whole number")
    kept = np.where(rows.counted, numbers, 0)
    return kept.astype(np.int32 if np.abs(kept).max() < 2**31 else np.int64)


def _mask(values: Any, rows: Rows) -> np.ndarray:
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
        if _empty(cell)[0]:
            return f"an empty cell is {meant}; is the file cut off here?"
        return f"{cell.tolist()[0]!r} is {meant}"

    rows.refuse(wrong, "mask", why)
    return numbers == 1.0


def _sequences(values: Any, step: np.ndarray | None, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """A code a row and the name of each code; the same id at another step is another sequence."""
    array = np.asarray(values)
    rows.refuse(_empty(array), "sequence", lambda row: "empty")
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


def _groups(values: Any, rows: Rows) -> np.ndarray:
    """A number a row: the name itself where all are whole numbers, else a hash of it as text."""
    array = np.asarray(values)
    rows.refuse(_empty(array), "group", lambda row: "empty")
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
