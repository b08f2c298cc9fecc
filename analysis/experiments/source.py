"""Which source a run's numbers came from."""

from __future__ import annotations

import hashlib
from pathlib import Path

import analysis

#: What the numbers of a training run depend on, in the package.
SOURCES = ("checks.py", "shapes.py", "kl", "objectives", "training", "experiments/presets.py")


def source_sha256() -> str:
    """Hash of the package source that a run's numbers depend on."""
    root = Path(analysis.__path__[0])
    paths = [root / name for name in SOURCES]
    files = [
        file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
    ]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
        digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()
