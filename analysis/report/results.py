"""Recorded results: runs too long for a build, sealed by a manifest.

Each folder in ``results/`` holds a ``manifest.json``::

    {"preset": "...", "seeds": [0, 1, ...], "device": "...", "versions": {"torch": "..."},
     "source": "sha256 of the package that made it", "files": {"metrics.parquet": "sha256"},
     "sha256": "of the fields above"}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis.errors import UserError
from analysis.files import sha256_file, unsealed
from analysis.report.project import Project

MANIFEST = "manifest.json"
REQUIRED = {
    "preset": str,
    "seeds": list,
    "device": str,
    "versions": dict,
    "source": str,
    "files": dict,
}
_DESCRIPTIONS = {"README.md"}


def recorded_results(project: Project) -> list[Path]:
    """The folders of recorded results."""
    return [path for path in _entries(project) if path.is_dir()]


def _entries(project: Project) -> list[Path]:
    """What lies in ``results/``, but for hidden names: a folder has one until it is whole."""
    if not project.results.is_dir():
        return []
    return sorted(path for path in project.results.iterdir() if not path.name.startswith("."))


def verify_results(project: Project) -> None:
    """Check every recorded result against its manifest.

    Raises:
        UserError: a manifest is missing or incomplete, or a file was changed, lost or added.
    """
    for path in _entries(project):
        if path.is_file() and path.name not in _DESCRIPTIONS:
            raise UserError(f"{project.relative(path)}: move it into a recorded result's folder")
    for directory in recorded_results(project):
        _verify(directory, project.relative(directory))


def read_manifest(directory: Path, label: str) -> dict[str, Any]:
    """The manifest of one recorded result.

    Raises:
        UserError: it is missing, was edited or lacks a field.
    """
    if not (directory / MANIFEST).is_file():
        raise UserError(f"{label}/{MANIFEST} is missing: record the result again")
    try:
        manifest = unsealed((directory / MANIFEST).read_bytes())
    except (OSError, ValueError) as damage:
        raise UserError(f"{label}/{MANIFEST} {damage}: restore it or record again") from None
    for field, kind in REQUIRED.items():
        if not isinstance(manifest.get(field), kind):
            raise UserError(f"{label}/{MANIFEST} lacks {field!r} ({kind.__name__}): record again")
    return manifest


def _verify(directory: Path, label: str) -> None:
    recorded: dict[str, str] = read_manifest(directory, label)["files"]
    present = {
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file()
        and path.name not in (MANIFEST, *_DESCRIPTIONS)
        and not path.name.startswith(".")
    }
    for name in sorted(present | set(recorded)):
        if name not in present:
            raise UserError(f"{label}/{name} is in the manifest but missing: restore it")
        if name not in recorded:
            raise UserError(f"{label}/{name} is not in the manifest: record again or remove it")
        if sha256_file(directory / name) != recorded[name]:
            raise UserError(
                f"{label}/{name} changed since it was recorded: restore or record again"
            )
