"""What a run shows: one line a notebook, and on a terminal a bar with names and cells."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

from tqdm import tqdm


class Progress:
    """A bar over notebooks on a terminal; plain lines elsewhere."""

    def __init__(self, names: Iterable[str], stream: TextIO | None = None) -> None:
        self._names = list(names)
        self._stream = stream or sys.stderr
        self._width = max((len(name) for name in self._names), default=0)
        self._running: dict[str, str] = {}
        self._bar = tqdm(
            total=len(self._names),
            file=self._stream,
            disable=not self._stream.isatty(),
            bar_format="{bar:20} {n_fmt}/{total_fmt} [{elapsed}]{postfix}",
            leave=False,
        )

    def started(self, name: str) -> None:
        self._running[name] = "starting"
        if self._bar.disable:
            self.note(f"{name:<{self._width}}  running")
        self._show()

    def cell(self, name: str, index: int, count: int) -> None:
        self._running[name] = f"{index}/{count}"
        self._show()

    def ended(self, name: str, outcome: str) -> None:
        self._running.pop(name, None)
        self.note(f"{name:<{self._width}}  {outcome}")
        self._bar.update()
        self._show()

    def note(self, text: str) -> None:
        self._bar.write(text, file=self._stream)
        self._stream.flush()

    def tick(self) -> None:
        """Let the clock go on while a cell is silent."""
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()

    def _show(self) -> None:
        state = ", ".join(f"{name} {cell}" for name, cell in self._running.items())
        self._bar.set_postfix_str(state)
