"""One notebook in papermill, in a process of its own: watched, and stopped where it must be."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from analysis.freshness import ROOT
from analysis.report import kernel
from analysis.report.children import child
from analysis.report.kernel_server import asking
from analysis.report.notebooks.jobs import Job, Limits
from analysis.report.notebooks.working_copy import cell_label, cells_of, last_started, where
from analysis.report.processes import pinned_environment
from analysis.report.project import Project

#: Papermill names the cell that hangs; if even papermill falls silent, it is stopped after this.
SILENCE_GRACE_SECONDS = 60.0
#: The program that executes one notebook, and the name of its kernel.
PAPERMILL = "papermill.cli:papermill"
KERNEL = "python3"


class Failed(Exception):
    """A notebook did not come to its end, or not to one that may be published."""


@dataclass(eq=False)
class Execution:
    """One notebook with what its run may use, and how far it is."""

    project: Project
    job: Job
    limits: Limits
    server: str | None  #: of kernels, if there is one
    stopping: threading.Event = field(default_factory=threading.Event)
    cell: str = ""  #: shown while it runs

    def __call__(self, scratch: Path, output: Path) -> None:
        """Let papermill run the notebook; it saves ``output`` at every cell.

        Raises:
            Failed: it did not come to its end; names the cell.
        """
        self._install_kernel(scratch)
        parameters = scratch / "parameters.yaml"
        parameters.write_text(yaml.safe_dump(dict(self.job.overrides)), encoding="utf-8")
        settings = {
            "parameters_file": parameters,
            "kernel": KERNEL,
            "language": "python",
            "cwd": self.project.notebooks,
            "start-timeout": 60,
            "execution-timeout": math.ceil(self.limits.timeout),
            "autosave-cell-every": 2,
        }
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        variables = environment(
            PYTHONPATH=str(ROOT),
            IPYTHONDIR=str(scratch / "ipython"),
            JUPYTER_PATH=str(scratch),
            JUPYTER_RUNTIME_DIR=str(scratch / "runtime"),
        )
        for last in (False, True):
            with (
                open(scratch / "said", "w+b") as said,
                child(
                    *(PAPERMILL, str(self.job.source), str(output)),
                    *("--no-progress-bar", "--log-level=ERROR", *arguments),
                    scratch=scratch,
                    stdout=said,
                    stderr=said,
                    env=variables,
                ) as process,
            ):
                self._watch(process, output)
            if process.returncode == 0:
                return
            error = (scratch / "said").read_text(encoding="utf-8", errors="replace")
            # Two kernels that start at once can draw the same port, and then one never answers.
            if last or "Kernel didn't respond" not in error:
                raise Failed(self._why(output, process.returncode, error))

    def _watch(self, process: subprocess.Popen[Any], output: Path) -> None:
        """Wait for papermill; stop it when it is asked to, falls silent or fills the disk."""
        changed, heard = 0, time.monotonic()
        while not self.stopping.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
                break
            with contextlib.suppress(OSError):
                state = output.stat()
                if state.st_mtime_ns != changed:
                    changed, heard = state.st_mtime_ns, time.monotonic()
                    if sys.stderr.isatty() and (cells := cells_of(output)):
                        self.cell = f"{self.job.name} {last_started(cells) + 1}/{len(cells)}"
                if state.st_size > 2 * self.limits.cap and (cells := cells_of(output)):
                    raise too_long(cells, self.limits)
            silent = time.monotonic() - heard
            if silent > self.limits.timeout + SILENCE_GRACE_SECONDS:
                raise Failed(f"{where(output)} fell silent for {silent:.0f} s")
        if self.stopping.is_set():
            raise Failed("stopped")

    def _why(self, output: Path, status: int, error: str) -> str:
        """What ended papermill: a cell, the kernel, or something before or beside them."""
        place, cells = where(output), cells_of(output)
        if "\nnbclient.exceptions.CellTimeoutError" in error:
            return f"{place} ran longer than the limit of {self.limits.timeout:g} s"
        if "\nnbclient.exceptions.DeadKernelError" in error:
            return f"the kernel died in {place}"
        for shown in cells[last_started(cells)].get("outputs", ()) if cells else ():
            if shown["output_type"] == "error":
                lines = [line.strip() for line in shown["evalue"].strip().splitlines()]
                # Of a refused value pydantic's first line says neither which nor why.
                said = lines[1:3] if shown["ename"] == "ValidationError" else lines[:1]
                return ": ".join([f"{place} raised {shown['ename']}", *said])
        last = "".join(f": {line}" for line in error.strip().splitlines()[-1:])
        return f"{place} ended its runner (exit {status}){last}"

    def _install_kernel(self, scratch: Path) -> None:
        """Write a kernel of this very interpreter, whatever others there are."""
        root = str(self.project.root)
        program = [kernel.__file__] if self.server is None else asking(self.server)
        spec = {
            "argv": [
                *(sys.executable, "-P", *program, str(scratch / "reads"), root),
                *("-f", "{connection_file}"),
            ],
            "display_name": "Python 3 (ipykernel)",
            "language": "python",
            "env": {"PYTHONPATH": root},
        }
        folder = scratch / "kernels" / KERNEL
        folder.mkdir(parents=True)
        (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")


def too_long(cells: list[dict[str, Any]], limits: Limits) -> Failed:
    """Why a notebook is refused that wrote too much: names the cell with the longest outputs."""
    index = max(range(len(cells)), key=lambda i: len(json.dumps(cells[i].get("outputs", []))))
    cap = f"{limits.cap / 1e6:g} MB"
    return Failed(f"{cell_label(cells, index)} wrote more than {cap} of output")


def environment(**extra: str) -> dict[str, str]:
    """Of what runs notebooks: with it sets have one order."""
    return pinned_environment(PYTHONHASHSEED="0", **extra)
