"""Parts of a benchmark, on disk as soon as each is finished: one that was stopped goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        self._unfinished = store / f"{directory.name}-{place}"
        self._parts: Path | None = None

    def begin(self, stamp: Stamp, chosen: Any) -> None:
        """Take up the parts that were measured with this stamp, and drop all others.

        Args:
            stamp: source, device and versions.
            chosen: what else a part depends on; it is compared as text.

        Raises:
            Refused: nothing can be written there.
        """
        key = sha256_bytes(f"{stamp.model_dump_json()}\n{chosen}".encode())[:16]
        self._parts = self._unfinished / key
        if not self._parts.is_dir():
            shutil.rmtree(self._unfinished, ignore_errors=True)
        require_writable(self._parts)

    def holds(self, name: str) -> bool:
        """Was this part measured before?"""
        return self._file(name).is_file()

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """What ``measure`` gives, now or before: numbers, text, and lists and dicts of them."""
        file = self._file(name)
        if not file.is_file():
            replace_file(file, json.dumps(measure()).encode())
        return json.loads(file.read_text(encoding="utf-8"))

    def end(self) -> None:
        """The whole is where it should be: the parts are no longer needed."""
        shutil.rmtree(self._unfinished, ignore_errors=True)

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
