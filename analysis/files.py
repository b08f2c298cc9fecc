"""Files that are either wholly old or wholly new."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from analysis.errors import Refused


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    return sha256_bytes(path.read_bytes())


def sha256_tree(root: Path, pattern: str = "**/*") -> str:
    """One digest of the names and contents of the files under ``root`` that match ``pattern``.

    Hidden ones and caches are left out.
    """
    digest = hashlib.sha256()
    for path in sorted(root.glob(pattern)):
        name = path.relative_to(root)
        left_out = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        if path.is_file() and not left_out:
            digest.update(f"{name.as_posix()}\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()


def write_durably(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` and wait until it is on disk; leave no torn file behind.

    Raises:
        Refused: the disk is full or the place is not writable; names path and size.
    """
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise Refused(_cannot_write(path, len(data), error)) from None


def replace_file(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` in one step: a reader sees the old file or the new one.

    Raises:
        Refused: see `write_durably`; the old file is then intact.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write_durably(temporary, data)
    try:
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise Refused(_cannot_write(path, len(data), error)) from None


def require_writable(directory: Path) -> None:
    """Make ``directory`` and prove that a file can be written there.

    Raises:
        Refused: it cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".writable-") as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
    except OSError as error:
        raise Refused(_cannot_write(directory, 4096, error)) from None


def _cannot_write(path: Path, size: int, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        existing = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
        free = shutil.disk_usage(existing).free
        return f"{path}: no room for {size:,} bytes ({free:,} free); free some space"
    return f"{path}: cannot be written ({error.strerror}); choose another place or fix its owner"
