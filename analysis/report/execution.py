"""Executing one notebook in a child process of its own, and hearing how it goes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import analysis
from analysis.report.processes import pinned_environment, stop_tree

# The child names a cell that hangs; if even the child falls silent, it is stopped after this.
SILENCE_GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class Request:
    """What one child has to do.

    Attributes:
        source: the notebook to run.
        parameters: values to inject, none for the defaults.
        output: where the child writes the executed notebook when every cell succeeded.
        failed: where it writes the notebook otherwise.
        cwd: the kernel's working directory.
        pythonpath: where the kernel finds ``analysis``.
        timeout: limit of a cell in seconds.
        cap: limit of the stored output in bytes.
    """

    source: str
    parameters: Mapping[str, Any]
    output: str
    failed: str
    cwd: str
    pythonpath: str
    timeout: float
    cap: int


def runner_command() -> list[str]:
    """The program that executes a `Request`."""
    return [sys.executable, "-P", "-m", "analysis.report.runner"]


class Execution:
    """A running child: feed it to a selector by ``stdout``, call `pump` when it is readable."""

    def __init__(self, request: Request, command: Callable[[], list[str]] = runner_command) -> None:
        self.request = request
        self.started = time.monotonic()
        self.result: dict[str, Any] | None = None
        self._cell: dict[str, Any] | None = None
        self._heard = self.started
        self._buffer = b""
        self._scratch = tempfile.TemporaryDirectory(prefix="analysis-run-")
        scratch = Path(self._scratch.name)
        self._errors = open(scratch / "stderr", "w+b")  # noqa: SIM115 - closed in `close`
        self._process = subprocess.Popen(
            command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env=pinned_environment(
                PYTHONPATH=str(Path(analysis.__file__).parents[1]),
                PYTHONHASHSEED="0",
                IPYTHONDIR=str(scratch / "ipython"),
                JUPYTER_RUNTIME_DIR=str(scratch / "runtime"),
            ),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.stdout = self._process.stdout
        with contextlib.suppress(BrokenPipeError):  # a child dead on arrival is seen in `pump`
            self._process.stdin.write(json.dumps(request.__dict__).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def pump(self) -> list[dict[str, Any]]:
        """Read what the child has said; the end of its output settles ``result``."""
        chunk = self.stdout.read1()  # type: ignore[attr-defined]
        self._heard = time.monotonic()
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        events = [json.loads(line) for line in lines]
        for event in events:
            if self.result is not None:
                break  # what follows a result is noise
            if event["event"] == "cell":
                self._cell = event
            elif event["event"] == "done":
                self.result = event
            else:
                self.result = self._failed(event["kind"], event["message"])
        if not chunk and self.result is None:
            self.result = self._lost()
        return events

    def check_silence(self) -> None:
        """Settle ``result`` when the child has said nothing for longer than a cell may take."""
        silent = time.monotonic() - self._heard
        if self.result is None and silent > self.request.timeout + SILENCE_GRACE_SECONDS:
            self.result = self._failed("cell", f"fell silent for {silent:.0f} s")

    def close(self) -> None:
        """End the child and whatever it started."""
        if self._process.poll() is None:
            stop_tree(self._process.pid)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self.stdout.close()
        self._errors.close()
        self._scratch.cleanup()

    def _failed(self, kind: str, message: str) -> dict[str, Any]:
        if kind == "cell":
            message = f"{self._where()} {message}"
        elif kind == "death":
            message = f"the kernel died in {self._where()}"
        return {"event": "failed", "message": message}

    def _where(self) -> str:
        if self._cell is None:
            return "the start of the kernel"
        return f"cell {self._cell['index']} (`{self._cell['line']}`)"

    def _lost(self) -> dict[str, Any]:
        self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        said = f": {last[0]}" if last else ""
        return self._failed("cell", f"ended its runner (exit {self._process.returncode}){said}")
