"""A recorded folder: tables and the manifest that seals them with the hash of each.

The folder appears whole or not at all. Numbers keep six significant digits.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.files import sha256_file

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
            table.to_csv(partial / name, index=False, float_format=FLOAT_FORMAT)
        manifest = {
            **fields,
            "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "files": {name: sha256_file(partial / name) for name in tables},
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
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
