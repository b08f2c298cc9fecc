"""The child program that executes one notebook with papermill.

It reads what to do as one line of JSON from its standard input and ends as soon as that input
closes, so it cannot outlive the process that started it. It answers with a line of JSON: empty if
the notebook ran to its end, else what went wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError

from analysis.report import kernel
from analysis.report.processes import stop_tree

KERNEL = "python3"
_SILENT = "Kernel didn't respond"


def install_kernel(scratch: Path, root: Path) -> None:
    """Put first in Jupyter's path a kernel of this very interpreter, whatever others there are."""
    spec = {
        "argv": [
            *(sys.executable, "-P", kernel.__file__, str(scratch / "reads"), str(root)),
            *("-f", "{connection_file}"),
        ],
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "env": {"PYTHONPATH": str(root)},
    }
    folder = scratch / "kernels" / KERNEL
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    os.environ["JUPYTER_PATH"] = str(scratch)


def execute(request: dict[str, Any]) -> None:
    """Run the requested notebook; papermill saves it at every cell."""
    scratch = Path(request["scratch"])
    install_kernel(scratch, Path(request["root"]))
    for last in (False, True):
        try:
            papermill.execute_notebook(
                request["source"],
                request["output"],
                parameters=request["parameters"],
                kernel_name=KERNEL,
                language="python",
                progress_bar=False,
                cwd=request["cwd"],
                start_timeout=60,
                execution_timeout=request["timeout"],
                autosave_cell_every=2,
                record_timing=False,
            )
            return
        except RuntimeError as error:
            # Two kernels that start at once can draw the same port, and then one never answers.
            if last or not str(error).startswith(_SILENT):
                raise


def explain(error: Exception, timeout: float) -> dict[str, str]:
    """What went wrong: in a cell, with the kernel, or before anything ran."""
    if isinstance(error, PapermillExecutionError):
        value = error.evalue.strip().splitlines()
        return {"in_cell": f"raised {error.ename}" + (f": {value[0]}" if value else "")}
    if isinstance(error, CellTimeoutError):
        return {"in_cell": f"ran longer than the limit of {timeout:g} s"}
    if isinstance(error, DeadKernelError):
        return {"died": "the kernel died"}
    lines = str(error).strip().splitlines() or [""]
    return {"refused": f"{type(error).__name__}: {lines[0]}"}


def end_with_parent(scratch: str) -> NoReturn:
    """Wait until standard input closes, then take the kernel and ourselves down."""
    sys.stdin.read()
    stop_tree(os.getpid(), itself=False)
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


def main() -> None:
    outcome = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stray prints are no outcome
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_parent, args=[request["scratch"]], daemon=True).start()
    try:
        execute(request)
        said = {}
    except Exception as error:  # whatever happened must reach the parent as one line
        said = explain(error, request["timeout"])
    outcome.write(json.dumps(said) + "\n")
    outcome.flush()
    os._exit(0)  # nothing here is worth waiting for


if __name__ == "__main__":
    main()
