"""The child program that executes one notebook through papermill and reports in JSON lines.

It reads a request from the first line of its standard input and ends as soon as that input closes,
so it cannot outlive the process that started it. See `analysis.report.execution` for the other end.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn, TextIO

import nbformat
import papermill
from jupyter_client.kernelspec import KernelSpecManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError

from analysis.errors import Refused
from analysis.files import write_durably
from analysis.report.processes import stop_descendants, stop_tree

KERNEL = "python3"
_PREFIX = "__import__('sys').prefix"
_COMPUTED_ON = """(lambda torch: torch.cuda.get_device_name()
    if torch and torch.cuda.is_initialized() else "cpu")(__import__("sys").modules.get("torch"))"""


#: Waits for a kernel's first answer, one a try. Two kernels that start at once can draw the same
#: port, and then one of them never answers; nothing has run yet, so another is started.
STARTUP_SECONDS = (60, 120)


class OutputTooLarge(Exception):
    """A cell wrote more than the notebook may hold."""


class WatchedClient(PapermillNotebookClient):
    """Papermill's client that knows its cell, caps its output and checks its interpreter."""

    def __init__(self, nb_man: Any, *, cap: int, report: Reporter, **options: Any) -> None:
        super().__init__(nb_man, **options)
        self.cap = cap
        self.written = 0
        self.report = report
        self.has_answered = False

    def papermill_execute_cells(self) -> None:
        self.has_answered = True
        prefix = self.ask(_PREFIX)
        if Path(prefix).resolve() != Path(sys.prefix).resolve():
            raise Refused(f"the kernel runs the Python of {prefix}, not of {sys.prefix}")
        super().papermill_execute_cells()
        self.report.device = self.ask(_COMPUTED_ON)

    def ask(self, expression: str) -> Any:
        """The value of a Python literal expression in the kernel."""
        message = self.kc.execute("", silent=True, user_expressions={"answer": expression})
        answer = self.wait_for_reply(message)["content"]["user_expressions"]["answer"]
        return ast.literal_eval(answer["data"]["text/plain"])

    def execute_cell(self, cell: Any, cell_index: int, **options: Any) -> Any:
        self.report.cell(self.nb.cells, cell_index)
        try:
            return super().execute_cell(cell, cell_index, **options)
        except DeadKernelError:
            if self.written > self.cap:  # we killed it
                raise OutputTooLarge from None
            raise

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        self.written += text_length(msg["content"])
        if self.written > self.cap:
            stop_tree(self.km.provisioner.pid)
            raise OutputTooLarge
        return super().process_message(msg, cell, cell_index)


class Reporter:
    """Writes what happens to the parent, one JSON object a line."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.device = "cpu"
        self.notebook: Any = None
        self.index = 0

    def send(self, event: str, **content: Any) -> None:
        self.stream.write(json.dumps({"event": event, **content}) + "\n")
        self.stream.flush()

    def cell(self, cells: list[Any], position: int) -> None:
        injected = [
            i for i, c in enumerate(cells) if "injected-parameters" in c.metadata.get("tags", ())
        ]
        self.index = position + 1 - sum(i <= position for i in injected)
        source = cells[position].source.strip() or " "
        self.send(
            "cell",
            index=self.index,
            count=len(cells) - len(injected),
            line=source.splitlines()[0][:80],
        )


def text_length(content: Any) -> int:
    """The characters held by the strings in a message."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, dict):
        content = content.values()
    elif not isinstance(content, list):
        return 0
    return sum(text_length(part) for part in content)


def require_own_kernel() -> None:
    """Refuse a kernel specification that would start another interpreter than this one."""
    spec = KernelSpecManager().get_kernel_spec(KERNEL)
    program = spec.argv[0]
    version = sys.version_info
    own = {"python", "python3", f"python3.{version.minor}"}  # jupyter starts these as ourselves
    if program not in own and Path(program).parent.absolute() != Path(sys.executable).parent:
        raise Refused(
            f"the kernel {KERNEL!r} in {spec.resource_dir} starts {program}, not {sys.executable}; "
            "unset JUPYTER_PATH or remove it"
        )


def clean(notebook: Any) -> Any:
    """Drop what differs between two equal runs: times, durations and paths."""
    papermill_metadata = notebook.metadata.get("papermill", {})
    notebook.metadata["papermill"] = {
        key: papermill_metadata[key]
        for key in ("parameters", "version")
        if key in papermill_metadata
    }
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if cell.metadata.get("tags") == []:  # papermill adds an empty list
            del cell.metadata["tags"]
        if "injected-parameters" in cell.metadata.get("tags", ()):
            cell["id"] = "injected-parameters"  # papermill draws a random one
    return notebook


def execute(request: dict[str, Any], report: Reporter) -> Any:
    """Run the requested notebook and return it; ``report.notebook`` holds it while it runs."""

    class Engine(NBClientEngine):
        """Papermill's default engine with the watched client."""

        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **_: Any) -> None:
            report.notebook = nb_man.nb
            for seconds in STARTUP_SECONDS:
                client = WatchedClient(
                    nb_man,
                    cap=request["cap"],
                    report=report,
                    kernel_name=kernel_name,
                    timeout=request["timeout"],
                    startup_timeout=seconds,
                    record_timing=False,
                    shutdown_kernel="immediate",
                )
                try:
                    client.execute()
                    return
                except RuntimeError:
                    if client.has_answered or seconds == STARTUP_SECONDS[-1]:
                        raise

    papermill_engines.register("watched", Engine)
    notebook = nbformat.read(request["source"], as_version=4)
    return papermill.execute_notebook(
        notebook,
        None,
        parameters=request["parameters"],
        engine_name="watched",
        kernel_name=KERNEL,
        language="python",
        progress_bar=False,
        cwd=request["cwd"],
    )


def failure(error: Exception, request: dict[str, Any]) -> tuple[str, str]:
    """The kind of a failure (cell, death, refused) and what happened, to follow "cell k"."""
    match error:
        case PapermillExecutionError():
            value = error.evalue.strip().splitlines()
            return "cell", f"raised {error.ename}" + (f": {value[0]}" if value else "")
        case DeadKernelError():
            return "death", ""
        case CellTimeoutError():
            return "cell", f"ran longer than the limit of {request['timeout']} s"
        case OutputTooLarge():
            return "cell", f"wrote more than {request['cap'] / 1e6:g} MB of output"
        case Refused():
            return "refused", str(error)
    lines = str(error).strip().splitlines() or [""]
    return "refused", f"{type(error).__name__}: {lines[0]}"


def write(notebook: Any, path: str) -> None:
    write_durably(Path(path), (nbformat.writes(clean(notebook)) + "\n").encode())


def serve(request: dict[str, Any], report: Reporter) -> None:
    """Execute one request and say how it ended."""
    try:
        require_own_kernel()
        write(execute(request, report), request["output"])
    except Exception as error:  # whatever happened must reach the parent as one line
        if report.notebook is not None:
            with contextlib.suppress(Refused):
                write(report.notebook, request["failed"])
        kind, message = failure(error, request)
        report.send("failed", kind=kind, message=message)
    else:
        report.send("done", device=report.device)


def end_with_parent() -> NoReturn:
    """Wait until standard input closes, then take the kernel and ourselves down."""
    sys.stdin.read()
    stop_descendants()
    os._exit(1)


def main() -> None:
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stray prints must not break the protocol
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ["PYTHONPATH"] = request["pythonpath"]
    serve(request, Reporter(stream))
    os._exit(0)  # nothing here is worth waiting for


if __name__ == "__main__":
    main()
