"""How much of a dump is read at most: beyond it one line says so, and no memory is taken for it.

The limits hold for each file; a larger dump is a folder of files. ``GIGABYTES`` are of what is
unpacked, so that a compressed file cannot be more than it looks.
"""

from __future__ import annotations

import gzip
import io
import json
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from kl_term.errors import UserError

GIGABYTES = 2.0  #: unpacked
ROWS = 50_000_000  #: of tokens
COLUMNS = 1_000
LINE = 256 * 2**20  #: characters of one line of JSON
DEPTH = 50  #: of lists and objects in a line of JSON
SECONDS = 900.0  #: to read a file's text
_SPLIT = "give a folder of smaller files"


def check_columns(names: Iterable[str], label: str) -> None:
    """Refuse more columns than a dump has, before they are compared with those it may have."""
    if (found := len([*names])) > COLUMNS:
        raise UserError(f"{label}: has {found:,} columns, and at most {COLUMNS:,} are read")


def check_rows(rows: int, label: str) -> None:
    if rows > ROWS:
        raise UserError(f"{label}: holds {rows:,} tokens, and at most {ROWS:,} are read: {_SPLIT}")


def check_bytes(size: int, label: str) -> None:
    if size > GIGABYTES * 2**30:
        raise UserError(
            f"{label}: holds more than {GIGABYTES:g} GB, unpacked, the most that is read: {_SPLIT}"
        )


def check_archive(path: Path) -> None:
    """What a zip says that it unpacks to; a file that is none counts as it is."""
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            check_columns(names, str(path))
            size = max(size, sum(member.file_size for member in archive.infolist()))
    check_bytes(size, str(path))


class Bounded(io.RawIOBase):
    """The bytes of a file, as long as they are within the budget of size and time."""

    def __init__(self, file: BinaryIO, label: str) -> None:
        self._file, self._label = file, label
        self._read, self._began = 0, time.monotonic()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self._read += len(data)
        check_bytes(self._read, self._label)
        if time.monotonic() - self._began > SECONDS:
            raise UserError(f"{self._label}: is not read after {SECONDS:g} s: {_SPLIT}")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def open_text(path: Path) -> TextIO:
    """Text, unpacked, within the budget."""
    packed = path.name.lower().endswith(".gz")
    file = gzip.open(path, "rb") if packed else open(path, "rb")  # noqa: SIM115, closed with it
    bounded = io.BufferedReader(Bounded(file, str(path)), 2**20)
    return io.TextIOWrapper(bounded, encoding="utf-8-sig", newline="")


def json_lines(file: Any, label: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The object of each line that is not blank, with the number of the line.

    Raises:
        UserError: a line is no JSON object, says a key twice, or is beyond the budget.
    """
    for number, line in enumerate(iter(lambda: file.readline(LINE), ""), start=1):
        here = f"{label}: line {number}"
        if number > ROWS:
            raise UserError(f"{label}: has more than {ROWS:,} lines, the most read: {_SPLIT}")
        if len(line) >= LINE:
            raise UserError(f"{here} has more than {LINE:,} characters: dump a sequence a line")
        if line.strip():
            yield number, _object(line, here)


def _object(line: str, label: str) -> dict[str, Any]:
    try:
        row = json.loads(line, object_pairs_hook=said_once)
    except UserError as refusal:
        raise UserError(f"{label} {refusal}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{label} is no JSON ({error}); delete it if a killed process tore it"
        ) from None
    if not isinstance(row, dict):
        raise UserError(f"{label} is no JSON object")
    check_columns(row, label)
    if line.count("[") + line.count("{") > DEPTH and _depth(row) > DEPTH:
        raise UserError(f"{label} is nested deeper than {DEPTH} lists or objects")
    return row


def said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ: of two, nobody knows which is meant."""
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"says {twice[:40]!r} twice")
    return row


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [part.values() if isinstance(part, dict) else part for part in level]
        level = [each for part in inner for each in part if isinstance(each, list | dict)]
    return depth
