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

from analysis.files import replace_file, sha256_file

MANIFEST = "manifest.json"
FLOAT_FORMAT = "%.6g"


def write_folder(
    directory: Path, tables: Mapping[str, pd.DataFrame], fields: Mapping[str, Any]
) -> None:
    """Write tables and their manifest, replacing what the folder held.

    Args:
        tables: by file name.
        fields: of the manifest; the time and the hash of each file are added.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
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
            shutil.rmtree(directory)
        os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a recorded folder, once its files are found to be those it names.

    Raises:
        ValueError: a file is missing or is not the one that was recorded.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(f"{path} is missing: record the run again")
    manifest = json.loads(path.read_text())
    for name, digest in manifest["files"].items():
        file = directory / name
        if not file.is_file() or sha256_file(file) != digest:
            raise ValueError(f"{file} is missing or changed since it was recorded: restore it")
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
