"""Parts of a benchmark, on disk as soon as each is finished: one that was stopped goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from analysis.errors import Refused
from analysis.experiments.ablations.stamp import Stamp
from analysis.files import replace_file, require_writable, sha256_bytes

STORE = Path("sweeps") / "benchmarks"


class Journal:
    """The finished parts of one benchmark, by name.

    Args:
        directory: where the whole will go.
        store: a folder for the parts of unfinished benchmarks.
    """

    def __init__(self, directory: Path, store: Path = STORE) -> None:
        place = sha256_bytes(str(directory.resolve()).encode())[:8]
        self._directory = directory
        self._unfinished = store / f"{directory.name}-{place}"
        self._lock = FileLock(self._unfinished.with_suffix(".lock"))
        self._parts: Path | None = None

    def begin(self, stamp: Stamp, chosen: Any) -> None:
        """Take up the parts that were measured with this stamp, and drop all others.

        Args:
            stamp: source, device and versions.
            chosen: what else a part depends on; it is compared as text.

        Raises:
            Refused: nothing can be written there, or another process is at it.
        """
        require_writable(self._unfinished.parent)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise Refused(
                f"{self._directory}: another process is measuring for it; wait for that, or name "
                "another directory"
            ) from None
        key = sha256_bytes(f"{stamp.model_dump_json()}\n{chosen}".encode())[:16]
        self._parts = self._unfinished / key
        if not self._parts.is_dir():
            shutil.rmtree(self._unfinished, ignore_errors=True)
        require_writable(self._parts)

    def holds(self, name: str) -> bool:
        """Was this part measured before?"""
        return self._read(name) is not None

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """What ``measure`` gives, now or before: numbers, text, and lists and dicts of them."""
        if not self.holds(name):
            replace_file(self._file(name), json.dumps(measure()).encode())
        return self._read(name)

    def end(self) -> None:
        """The whole is where it should be: the parts are no longer needed."""
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._lock.release()

    def _read(self, name: str) -> Any | None:
        """A part; None if it is not there, or damaged."""
        try:
            return json.loads(self._file(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError):
            return None

    def _file(self, name: str) -> Path:
        if self._parts is None:
            raise ValueError("the journal has not begun: call begin first")
        return self._parts / f"{name.replace(' ', '_')}.json"


class Unwritten(Journal):
    """Keeps nothing: for a slice of seconds."""

    def __init__(self) -> None:
        """Nowhere."""

    def begin(self, stamp: Stamp, chosen: Any) -> None:
        """Nothing to take up."""

    def holds(self, name: str) -> bool:
        """Never."""
        return False

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """What ``measure`` gives."""
        return measure()

    def end(self) -> None:
        """Nothing to drop."""
