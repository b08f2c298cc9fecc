"""A recorded folder: tables and the manifest that seals them with the hash of each.

The folder appears whole or not at all. Numbers keep six significant digits.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.errors import Refused
from analysis.files import replace_file, sha256_file

MANIFEST = "manifest.json"
FLOAT_FORMAT = "%.6g"


def check_target(directory: Path) -> None:
    """Refuse a place where recording would destroy something that is no recording.

    Raises:
        Refused: a file, a folder that one is in, or a folder with other things than a recording.
    """
    if directory.is_file():
        raise Refused(f"{directory} is a file: name a folder to record in")
    if Path.cwd().is_relative_to(directory.resolve()):
        raise Refused(f"{directory} holds the folder you are in: name a new folder to record in")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MANIFEST).is_file():
        raise Refused(f"{directory} is no recording, and would be replaced: name a new folder")


def write_folder(
    directory: Path, tables: Mapping[str, pd.DataFrame], fields: Mapping[str, Any]
) -> None:
    """Write tables and their manifest, replacing what the folder held.

    Args:
        tables: by file name.
        fields: of the manifest; the time and the hash of each file are added.

    Raises:
        Refused: see :func:`check_target`.
    """
    check_target(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    before = partial.with_name(f"{partial.name}-before")
    try:
        for name, table in tables.items():
            (partial / name).write_text(_as_text(table))
        manifest = {
            **fields,
            "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "files": {name: sha256_file(partial / name) for name in tables},
        }
        (partial / MANIFEST).write_bytes(_as_bytes(manifest))
        partial.chmod(0o755)
        if directory.exists():
            os.replace(directory, before)
        os.replace(partial, directory)
        shutil.rmtree(before, ignore_errors=True)
    except BaseException:
        if before.exists() and not directory.exists():
            os.replace(before, directory)  # the earlier recording is where it was
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a recorded folder, once its files are found to be those it names.

    Raises:
        ValueError: as :func:`manifest_of`, or a file is missing or is not the recorded one.
    """
    manifest = manifest_of(directory)
    for name, digest in manifest["files"].items():
        file = directory / name
        if not file.is_file() or sha256_file(file) != digest:
            raise ValueError(f"{file} is missing or changed since it was recorded: restore it")
    return manifest


def manifest_of(directory: Path) -> dict[str, Any]:
    """The manifest of a recorded folder, its files unread.

    Raises:
        ValueError: it is missing or is none.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(f"{path} is missing: record the run again")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path} is no JSON: restore it or record the run again") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{path} is no manifest, it lists no files: restore it")
    return manifest


def amend_manifest(directory: Path, fields: Mapping[str, Any]) -> None:
    """Add or replace fields of the manifest of a recorded folder, in one step; tables stay.

    Raises:
        ValueError: see :func:`read_manifest`.
        Refused: the manifest cannot be written; it is then as it was.
    """
    replace_file(directory / MANIFEST, _as_bytes({**read_manifest(directory), **fields}))


def read_table(source: Path | io.StringIO) -> pd.DataFrame:
    """A table of a recorded folder: only an empty field is NaN, for an arm is named ``none``."""
    return pd.read_csv(source, keep_default_na=False, na_values=[""])


def as_written(table: pd.DataFrame) -> pd.DataFrame:
    """A table as it is after being written and read back: six significant digits."""
    return read_table(io.StringIO(_as_text(table)))


def _as_text(table: pd.DataFrame) -> str:
    return table.to_csv(index=False, float_format=FLOAT_FORMAT)


def _as_bytes(manifest: Mapping[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1) + "\n").encode()
