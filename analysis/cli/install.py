"""Filling a fresh virtual environment, with a bar: ``.venv/bin/python -m analysis.cli.install``.

It runs before anything is installed, so it needs only the standard library. Pip's own configuration
says which index is asked.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True)
class Step:
    """One call of ``pip install``."""

    title: str
    arguments: tuple[str, ...]


# torch stays outside the hash lock: whichever build of the pinned version the index offers will do,
# such as a CPU wheel.
STEPS = (
    Step(
        "locked packages, hashes checked",
        ("--no-deps", "--require-hashes", "-r", "requirements.lock"),
    ),
    Step("torch", ("--constraint", "constraints.txt", "torch")),
    Step("this package", ("--no-deps", "--no-build-isolation", "--editable", ".")),
)


class Line:
    """A line that is rewritten in place on a terminal, and left alone elsewhere."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream, self._prefix = stream, prefix
        self._started = time.monotonic()
        self._interactive = stream.isatty()
        if not self._interactive:
            stream.write(f"{prefix} ...\n")
            stream.flush()

    def show(self, text: str) -> None:
        if self._interactive:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\033[K{f'{self._prefix}: {text}'[:width]}")
            self._stream.flush()

    def end(self, text: str) -> None:
        start = "\r\033[K" if self._interactive else ""
        took = time.monotonic() - self._started
        self._stream.write(f"{start}{self._prefix}: {text} in {took:.0f} s\n")
        self._stream.flush()


def bar(done: int, total: int, width: int = 20) -> str:
    """``done`` of ``total`` as a bar of characters."""
    filled = min(width, width * done // max(total, 1))
    return f"[{'#' * filled}{'.' * (width - filled)}] {done}/{total}"


def locked_packages(lock: str) -> int:
    """The number of packages pinned in the text of a lock file."""
    return len({line.partition("==")[0] for line in lock.splitlines() if line[:1].isalnum()})


def progress(output: Iterator[str], total: int, line: Line) -> list[str]:
    """Show pip's progress; return the output lines that say what went wrong."""
    done = 0
    errors = []
    for said in output:
        words = said.split()
        if said.startswith("Collecting"):
            done += 1
            line.show(f"{bar(done, total)} {words[1].partition('==')[0]}")
        elif said.startswith("  Downloading"):
            line.show(f"{bar(done, total)} {' '.join(words)}")
        elif said.startswith("Installing collected"):
            line.show("unpacking")
        elif said.startswith(("ERROR", "error")) or errors:
            errors.append(said.rstrip())
    return errors


def run(step: Step, position: int) -> bool:
    """Run one step; print what pip complains of if it fails."""
    with open("requirements.lock", encoding="utf-8") as file:
        total = locked_packages(file.read()) if position == 1 else 1
    line = Line(sys.stderr, f"[{position}/{len(STEPS)}] {step.title}")
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", "--no-input"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stderr:
        with subprocess.Popen(
            [*command, *step.arguments], stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as pip:
            assert pip.stdout is not None
            errors = progress(iter(pip.stdout), total, line)
        if pip.returncode == 0:
            line.end("done")
            return True
        stderr.seek(0)
        line.end("failed")
        complaints = [text.rstrip() for text in stderr if text.strip() and "WARNING" not in text]
        print("\n".join([*errors, *complaints][-25:]), file=sys.stderr)
    return False


def main() -> int:
    """Run every step until one fails."""
    return 0 if all(run(step, i) for i, step in enumerate(STEPS, start=1)) else 1


if __name__ == "__main__":
    sys.exit(main())
