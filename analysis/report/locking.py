"""One writer at a time, and the others know who it is."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout


class Claim:
    """The right to write one output, held by at most one process on a file system."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(path)
        self._holder = path.with_suffix(".holder")

    def acquire(self) -> bool:
        """Take the claim if it is free."""
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            return False
        self._holder.write_text(json.dumps({"pid": os.getpid(), "host": platform.node()}))
        return True

    def holder(self) -> str:
        """Who holds the claim, in words."""
        try:
            holder = json.loads(self._holder.read_text())
            return f"process {holder['pid']} on {holder['host']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def release(self) -> None:
        if self._lock.is_locked:
            with contextlib.suppress(OSError):
                self._holder.unlink()
            self._lock.release()

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
