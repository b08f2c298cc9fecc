"""The surroundings of a process: threads, cores, signals, and one writer of an output at a time."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Reductions in another order give other last digits: one thread makes runs repeatable.
THREADS = 1
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def pinned_environment(**extra: str) -> dict[str, str]:
    """This process's environment with the numerical libraries pinned to `THREADS` threads."""
    pinned = dict.fromkeys(_THREAD_VARIABLES, str(THREADS))
    return os.environ | pinned | {"PYTHONUTF8": "1"} | extra


def available_cores() -> int:
    """The cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def exclusive(path: Path, busy: Callable[[str], object]) -> Iterator[None]:
    """Hold the lock at ``path``, which at most one process on a file system does.

    Args:
        busy: called again and again with who holds it, in words, while it is not free; may raise.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    note = path.with_suffix(".holder")
    lock = FileLock(path)
    while True:
        try:
            lock.acquire(timeout=0.2, poll_interval=0.1)
            break
        except Timeout:
            busy(_holder(note))
    try:
        note.write_text(json.dumps({"pid": os.getpid(), "host": platform.node()}))
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def _holder(note: Path) -> str:
    try:
        holder = json.loads(note.read_bytes())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
