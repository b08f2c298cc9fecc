"""Dumps of rollouts: a CSV, JSON lines or parquet file, or a folder of them and its settings.

One row a token or one row a sequence.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from pydantic import ValidationError

from kl_term.diagnosis.budgets import (
    Bounded,
    check_bytes,
    check_columns,
    check_rows,
    json_lines,
    said_once,
)
from kl_term.diagnosis.columns import NAMES, OPTIONAL, assemble, canonical
from kl_term.diagnosis.listed import holds_lists, parsed_lists, unbatched
from kl_term.diagnosis.schema import Rollouts, Settings
from kl_term.diagnosis.tensors import TENSORS, read_tensors
from kl_term.errors import UserError, first_problem
from kl_term.files import replace_file

FORMATS = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz", ".parquet")
_REQUIRED = ("logp", "old_logp", "ref_logp", "position")
#: Of a CSV, parsed at a time.
CSV_ROWS = 50_000
#: What the trainer did, beside the files of its processes.
SETTINGS = "settings.json"


#: What a trainer or a logger writes of a run's means.
_LOGS = ("trainer_state.json", "log_history.json", "wandb-summary.json", "wandb-history.jsonl")


def read_rollouts(path: str | Path) -> Rollouts:
    """The rollouts of a file, whose ending says the format, or of all such files in a folder.

    Raises:
        UserError: no such file, another format, an unreadable or empty file, or a bad row: one line
            naming file, row and column. Rows are numbered as lines of the file.
    """
    path = Path(path)
    name = path.name.lower()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.lower().endswith(FORMATS))
        if not files:
            raise UserError(f"{path}: holds no dump; give one of {', '.join(FORMATS)}")
        return _join({file: read_rollouts(file) for file in files})
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if not path.stat().st_size:
        raise UserError(f"{path}: is empty; dump at least one sequence")
    try:
        if name.endswith((".csv", ".csv.gz")):
            table = _read_csv(path)
            if holds_lists(table):
                return _assemble_nested(parsed_lists(table, str(path)), str(path), first=2)
            try:
                return assemble(table, str(path), lambda row: f"line {row + 2}")
            except UserError:
                _refuse_torn_line(path)
                raise
        if name.endswith((".jsonl", ".jsonl.gz")):
            with _open(path) as file:
                return _assemble_nested(_read_json_lines(file, path), str(path))
        if name.endswith(".parquet"):
            return _assemble_nested(_read_parquet(path), str(path))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        first, *_ = str(error).splitlines()
        raise UserError(f"{path}: cannot be read ({first})") from None
    if name.endswith(TENSORS):
        return read_tensors(path)
    if name in _LOGS or name.endswith((".wandb", ".json")) or "tfevents" in name:
        raise UserError(
            f"{path}: a log holds means of steps, and a diagnosis needs the log-probs of tokens: "
            "dump them (kl-term diagnose --how-to-dump plain)"
        )
    raise UserError(f"{path}: unknown format; give one of {', '.join((*FORMATS, *TENSORS))}")


def _open(path: Path) -> TextIO:
    """Text, unpacked, within the budget."""
    packed = path.name.lower().endswith(".gz")
    file = gzip.open(path, "rb") if packed else open(path, "rb")  # noqa: SIM115, closed with it
    bounded = io.BufferedReader(Bounded(file, str(path)), 2**20)
    return io.TextIOWrapper(bounded, encoding="utf-8-sig", newline="")


def _read_csv(path: Path) -> dict[str, np.ndarray]:
    import pandas as pd

    with _open(path) as file:
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

    blocks: dict[str, list[np.ndarray]] = {}
    with (
        _open(path) as file,
        pd.read_csv(file, low_memory=False, index_col=False, chunksize=CSV_ROWS) as frames,
    ):
        for frame in frames:
            if not all(kind.kind in "if" for kind in frame.dtypes):
                return None
            for name in frame.columns:
                blocks.setdefault(str(name), []).append(frame[name].to_numpy())
    return {name: np.concatenate(blocks.pop(name)) for name in [*blocks]}


def _whole(path: Path) -> dict[str, np.ndarray]:
    import pandas as pd

    with _open(path) as file:
        frame = pd.read_csv(file, low_memory=False, index_col=False)
    return {str(name): frame[name].to_numpy() for name in frame.columns}


def _refuse_torn_line(path: Path) -> None:
    """What pandas takes for empty cells."""
    with _open(path) as file:
        lines = csv.reader(file)
        header = next(lines)
        for line in lines:
            if 0 < len(line) < len(header):
                raise UserError(
                    f"{path}: line {lines.line_num} has {len(line)} of {len(header)} columns; "
                    "delete it if a killed process tore it"
                )


def _read_parquet(path: Path) -> Mapping[str, Any]:
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
    return _Columns({name: partial(_parquet_column, file, name) for name in names})


class _Columns(Mapping[str, Any]):
    """Columns of a table, each made when it is asked for: few are held at a time."""

    def __init__(self, made: dict[str, Callable[[], np.ndarray]]) -> None:
        self._made = made

    def __getitem__(self, name: str) -> np.ndarray:
        return self._made[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


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


def _assemble_nested(table: Mapping[str, Any], label: str, first: int = 1) -> Rollouts:
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
) -> _Columns:
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
    return _Columns(made)


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


def _read_json_lines(file: TextIO, path: Path) -> dict[str, np.ndarray]:
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


def record_settings(folder: str | Path, settings: Settings) -> None:
    """Say what the trainer does, for the diagnosis of the folder."""
    text = settings.model_dump_json(exclude_defaults=True) + "\n"
    replace_file(Path(folder) / SETTINGS, text.encode())


def recorded_settings(path: Path) -> Settings:
    """What the trainer did, if the folder says so.

    Raises:
        UserError: the file does not hold settings.
    """
    file = path / SETTINGS
    if not file.is_file():
        return Settings()
    check_bytes(file.stat().st_size, str(file))
    try:
        said = json.loads(file.read_bytes(), object_pairs_hook=said_once)
        return Settings.model_validate_json(json.dumps(said))
    except ValidationError as error:
        raise UserError(f"{file}: {first_problem(error)}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: {error}") from None


def _join(parts: dict[Path, Rollouts]) -> Rollouts:
    """All files as one; sequences are named by their file too.

    Raises:
        UserError: a file has a column that another lacks.
    """
    if len(parts) == 1:
        return next(iter(parts.values()))
    for column in (*OPTIONAL, "old_logp"):
        having = [file for file, part in parts.items() if _has(part, column)]
        lacking = [file for file in parts if file not in having]
        if having and lacking:
            raise UserError(
                f"{lacking[0]}: column {column} is missing, but {having[0].name} has it"
            )
    named = [
        f"{name} of {file.name}" for file, part in parts.items() for name in part.sequence_names
    ]
    every = list(parts.values())
    begins = np.cumsum([0, *(part.sequences for part in every)])
    columns = [name for name in (*_REQUIRED, *OPTIONAL) if getattr(every[0], name) is not None]
    return replace(
        every[0],
        sequence=np.concatenate(
            [part.sequence + np.int32(begin) for part, begin in zip(every, begins, strict=False)]
        ),
        # One at a time, each dropped from its parts: the dump is not held twice.
        **{n: np.concatenate([vars(part).pop(n) for part in every]) for n in columns},
        rows=sum(part.rows for part in every),
        unscored=sum(part.unscored for part in every),
        filled=sum(part.filled for part in every),
        filler=max(every, key=lambda part: part.filled).filler,
        sequence_names=tuple(named),
        ignored={name: near for part in every for name, near in part.ignored.items()},
    )


def _has(part: Rollouts, column: str) -> bool:
    return part.has_old_logp if column == "old_logp" else getattr(part, column) is not None
