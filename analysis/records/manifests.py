"""Recorded folders: tables beside a manifest of their hashes, which is sealed by its own.

A folder appears whole or not at all, and no edit of it goes unnoticed. ``manifest.json`` says what
was recorded, under which source, on which device and with which versions; since 2026-11-26 at which
commit and with which packages too, and since 2026-11-27 in which folder: under another name it is
refused. Of a folder that does not say it, the name must be of the preset and the device::

    {"folder": "...", "preset": "...", "seeds": [0, 1, ...], "device": "...",
     "versions": {"torch": "..."},
     "source": "sha256 of the package that made it", "commit": "of the checkout",
     "packages": "sha256 of names and versions", "files": {"curves.csv": "sha256"},
     "sha256": "of the fields above"}
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_term.errors import UserError
from kl_term.files import (
    replace_file,
    replace_folder,
    restore_folder,
    sealed,
    sha256_file,
    unsealed,
)

if TYPE_CHECKING:
    import pandas as pd

#: Where recorded folders lie.
RESULTS = Path(__file__).resolve().parents[2] / "results"
MANIFEST = "manifest.json"
FLOAT_FORMAT = "%.6g"
REQUIRED = {
    "preset": str,
    "seeds": list,
    "device": str,
    "versions": dict,
    "source": str,
    "files": dict,
}
#: What may lie beside tables, and beside recorded folders.
_DESCRIPTION = "README.md"


def check_target(directory: Path) -> None:
    """Refuse a place where recording would destroy something that is no recording."""
    if directory.is_file():
        raise UserError(f"{directory} is a file: name a folder to record in")
    if Path.cwd().is_relative_to(directory.resolve()):
        raise UserError(f"{directory} holds the folder you are in: name a new folder to record in")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MANIFEST).is_file():
        raise UserError(f"{directory} is no recording, and would be replaced: name a new folder")


def write_folder(
    directory: Path, tables: Mapping[str, pd.DataFrame], fields: Mapping[str, Any]
) -> None:
    """Write tables, six significant digits a number, and their manifest; replaces the folder.

    Args:
        tables: by file name.
        fields: of the manifest; the time, the hash of each file and the seal are added.
    """
    restore_folder(directory)
    check_target(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        for name, table in tables.items():
            replace_file(partial / name, as_text(table).encode())
        manifest = {
            **fields,
            "folder": directory.resolve().name,
            "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "files": {name: sha256_file(partial / name) for name in tables},
        }
        replace_file(partial / MANIFEST, sealed(manifest))
        partial.chmod(0o755)
        replace_folder(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def note_reproduced(directory: Path, provenance: Mapping[str, Any], runs: int) -> None:
    """Add to a manifest that so many runs came out again, digit by digit, and where."""
    manifest = read_manifest(directory)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    found = {**provenance, "runs": runs, "finished_at": when}
    replace_file(directory / MANIFEST, sealed(manifest | {"reproduced": found}))


def as_text(table: pd.DataFrame) -> str:
    """A table as it is written."""
    return table.to_csv(index=False, float_format=FLOAT_FORMAT)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a recorded folder, once its files are found to be those it names."""
    manifest = manifest_of(directory)
    _check_files(directory, manifest["files"])
    return manifest


def manifest_of(directory: Path) -> dict[str, Any]:
    """The manifest of a recorded folder, its files unread."""
    path = directory / MANIFEST
    if not path.is_file():
        raise UserError(f"{path} is missing: record the result again")
    try:
        manifest = unsealed(path.read_bytes())
    except (OSError, ValueError) as damage:
        raise UserError(f"{path} {damage}: restore it or record again") from None
    for field, kind in REQUIRED.items():
        if not isinstance(manifest.get(field), kind):
            raise UserError(f"{path} lacks {field!r} ({kind.__name__}): record again")
    if (name := directory.resolve().name) not in (names := _names(manifest)):
        raise UserError(
            f"{path} is of {names[0]}, not of {name}: give each recording its own folder's name"
        )
    return manifest


def _names(manifest: Mapping[str, Any]) -> list[str]:
    """What the folder of a manifest may be called."""
    if "folder" in manifest:
        return [str(manifest["folder"])]
    preset, device = manifest["preset"].replace(" ", "_"), manifest["device"].partition(",")[0]
    return [f"{preset}_{device}", preset]


def recorded_folders(results: Path) -> list[Path]:
    """The recorded folders in ``results``, by name."""
    if not results.is_dir():
        return []
    entries = sorted(path for path in results.iterdir() if not path.name.startswith("."))
    for path in entries:
        if path.is_file() and path.name != _DESCRIPTION:
            raise UserError(f"{path}: move it into a recorded result's folder")
    return [path for path in entries if path.is_dir()]


def verify_results(results: Path) -> None:
    """Check every recorded folder against its manifest."""
    for directory in recorded_folders(results):
        read_manifest(directory)


def _check_files(directory: Path, recorded: Mapping[str, str]) -> None:
    present = {
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file()
        and path.name not in (MANIFEST, _DESCRIPTION)
        and not path.name.startswith(".")
    }
    for name in sorted(present | set(recorded)):
        file = directory / name
        if name not in present:
            raise UserError(f"{file} is in the manifest but missing: restore it")
        if name not in recorded:
            raise UserError(f"{file} is not in the manifest: record again or remove it")
        if sha256_file(file) != recorded[name]:
            raise UserError(f"{file} changed since it was recorded: restore or record again")


def read_table(source: Path | io.StringIO) -> pd.DataFrame:
    """A table of a recorded folder: only an empty field is NaN, for a variant is named ``none``."""
    import pandas as pd  # which takes a third of a second, and checking hashes needs none

    return pd.read_csv(source, keep_default_na=False, na_values=[""])


def recorded_table(directory: Path, name: str) -> pd.DataFrame:
    """A table of a recorded folder, once its files are found to be those of its manifest.

    Raises:
        ValueError: as :func:`read_manifest`.
    """
    read_manifest(directory)
    return read_table(directory / name)


def as_written(table: pd.DataFrame) -> pd.DataFrame:
    """A table as it is after being written and read back: six significant digits."""
    return read_table(io.StringIO(as_text(table)))
