"""Files that are either wholly old or wholly new."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from kl_term.errors import UserError

#: The field of a sealed file that holds the hash of the others.
SEAL = "sha256"
#: Open for writing what is not there yet, whatever it is.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    return sha256_bytes(path.read_bytes())


def sha256_tree(root: Path) -> str:
    """One digest of the names and contents of files under ``root``; not of hidden ones, caches."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        left_out = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        if path.is_file() and not left_out:
            digest.update(f"{name.as_posix()}\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()


def read_json(path: Path, label: str) -> Any:
    """The content of a JSON file; ``label`` names it in a refusal."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{label}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{label}: no valid JSON; restore it or make it again") from None


def sealed(content: Mapping[str, Any]) -> bytes:
    """JSON that ends with the hash of the rest; no signature: whoever changes both is believed."""
    body = {name: value for name, value in content.items() if name != SEAL}
    return _json_bytes(body | {SEAL: sha256_bytes(_json_bytes(body))})


def unsealed(data: bytes) -> dict[str, Any]:
    """What :func:`sealed` was given.

    Raises:
        ValueError: a byte differs, or there is no seal; says which.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("is no valid JSON") from None
    if not isinstance(content, dict) or SEAL not in content:
        raise ValueError(f"has no {SEAL!r} that seals it")
    if sealed(content) != data:
        raise ValueError("changed since it was written")
    return {name: value for name, value in content.items() if name != SEAL}


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def replace_file(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` in one step: see :func:`replacing`."""
    with replacing(path, size=len(data)) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path, *, size: int = 0) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of ``path`` in one step when the block ends.

    A reader sees the old file or the whole new one, and an error in the block leaves the old one.
    Written beside it under a name that nobody can know before, so a planted link is not followed
    and threads do not meet; on disk, with its folder, before the block is left. A file that was
    there passes on its mode, a link is replaced and not its target. ``size``, in bytes, is what a
    refusal says that there was no room for.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no regular file: choose another place")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with _new_file(temporary, _mode(path)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise UserError(_cannot_write(path, size, error)) from None


def _mode(path: Path) -> int | None:
    """Of the regular file at ``path``; None where there is none, or a link."""
    with contextlib.suppress(OSError):
        found = path.lstat().st_mode
        if stat.S_ISREG(found):
            return stat.S_IMODE(found)
    return None


@contextlib.contextmanager
def _new_file(path: Path, mode: int | None) -> Iterator[BinaryIO]:
    """A file that was not there, of this mode or the umask's; an error takes it away again."""
    private = 0o666 if mode is None else 0o600  # no one reads it before it has its mode
    with open(os.open(path, _NEW, private), "wb") as file:
        try:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise


def _sync_folder(folder: Path) -> None:
    """The new name is on disk too, on a file system that can say so of a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def replace_folder(new: Path, target: Path) -> None:
    """Put folder ``new`` in the place of ``target``; an interruption leaves one of them whole.

    Killed in between, the next call, or :func:`restore_folder`, brings the earlier one back.
    """
    restore_folder(target)
    old = _aside(target)
    shutil.rmtree(old, ignore_errors=True)
    try:
        if target.exists():
            os.replace(target, old)
        os.replace(new, target)
    finally:
        restore_folder(target)
    shutil.rmtree(old, ignore_errors=True)


def restore_folder(target: Path) -> None:
    """Bring back what a replacement that did not come to its end has moved aside."""
    if not target.exists() and _aside(target).exists():
        os.replace(_aside(target), target)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def require_writable(directory: Path) -> None:
    """Make ``directory`` and prove that a file can be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".writable-") as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
    except OSError as error:
        raise UserError(_cannot_write(directory, 4096, error)) from None


def _cannot_write(path: Path, size: int, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        existing = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
        free = shutil.disk_usage(existing).free
        return f"{path}: no room for {size:,} bytes ({free:,} free); free some space"
    return f"{path}: cannot be written ({error.strerror}); choose another place or fix its owner"
