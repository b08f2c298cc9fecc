"""Running notebooks: a few at a time, each in a process of its own, published when it succeeds."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

import analysis
from analysis.freshness import processor_name, reads_sha256
from analysis.report import kernel
from analysis.report.children import child
from analysis.report.kernel_server import asking, kernel_server
from analysis.report.pages import output_problems
from analysis.report.parameters import changed_parameters, declared_parameters, resolve_parameters
from analysis.report.processes import THREADS, available_cores, exclusive, pinned_environment
from analysis.report.project import Project, select_notebooks
from analysis.report.provenance import (
    Provenance,
    RunFiles,
    hash_source,
    inputs_of,
    read_notebook,
    versions,
    why_stale,
    write_provenance,
)
from analysis.report.setup_cell import with_setup
from kl_term.errors import UserError
from kl_term.files import replace_file, require_writable, sha256_bytes

CELL_TIMEOUT_SECONDS = 1200.0
OUTPUT_CAP_BYTES = 20_000_000
#: Papermill names the cell that hangs; if even papermill falls silent, it is stopped after this.
SILENCE_GRACE_SECONDS = 60.0
#: The program that executes one notebook, and the name of its kernel.
PAPERMILL = "papermill.cli:papermill"
KERNEL = "python3"
#: From so many notebooks on, importing once for all kernels saves time.
WORTH_A_SERVER = 3


@dataclass(frozen=True)
class Limits:
    """How much a run may use."""

    jobs: int = field(default_factory=lambda: min(2, available_cores()))
    timeout: float = CELL_TIMEOUT_SECONDS  #: of a cell, in seconds
    cap: int = OUTPUT_CAP_BYTES  #: of the executed notebook


@dataclass(frozen=True, eq=False)
class Job:
    """One notebook with its checked parameters."""

    source: Path
    label: str
    parameters: Mapping[str, Any]
    overrides: Mapping[str, Any]  #: the parameters that differ from their defaults
    inputs: Mapping[str, str]  #: hashes of what the run is a function of
    files: RunFiles

    @property
    def name(self) -> str:
        return self.source.stem


class _Failed(Exception):
    """A notebook did not come to its end, or not to one that may be published."""


def plan(
    project: Project,
    sources: Iterable[Path],
    *,
    directory: Path,
    values: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
) -> list[Job]:
    """The jobs for ``sources``, with every parameter checked and no work done.

    Args:
        directory: where the executed notebooks go.
        values: parameters from a file, by name.
        texts: parameters typed on the command line, by name.
    """
    jobs = []
    for source in sources:
        label = project.relative(source)
        notebook = read_notebook(source, label)
        declared = declared_parameters(notebook, label)
        parameters = resolve_parameters(declared, values or {}, texts or {}, label)
        jobs.append(
            Job(
                source,
                label,
                parameters,
                changed_parameters(declared, parameters),
                inputs_of(project, notebook, parameters, label),
                RunFiles(directory, source.stem),
            )
        )
    return jobs


def stale_jobs(project: Project, jobs: Iterable[Job]) -> list[tuple[Job, str]]:
    """The jobs whose run is not current, each with the reason."""
    reasons = ((job, why_stale(project, job.files, job.inputs)) for job in jobs)
    return [(job, reason) for job, reason in reasons if reason is not None]


def run_jobs(project: Project, jobs: Iterable[Job], limits: Limits, *, force: bool = False) -> None:
    """Execute ``jobs``, a few at a time, and publish each that succeeds.

    One that fails stops no other, and leaves its earlier output as it is.

    Args:
        force: run what another process has just finished, too.
    """
    jobs = list(jobs)
    for directory in {job.files.directory for job in jobs}:
        require_writable(directory)
    for job in jobs:
        if job.files.output.is_dir() or job.files.provenance.is_dir():
            raise UserError(f"{job.files.output}: a folder is in the way; remove it")
    with contextlib.ExitStack() as serving:
        server = None
        if len(jobs) >= WORTH_A_SERVER:
            environment = _environment(PYTHONPATH=str(project.root))
            server = serving.enter_context(kernel_server(environment))
        _run_all([_Run(project, job, limits, force, server) for job in jobs], limits)


def _run_all(runs: Sequence[_Run], limits: Limits) -> None:
    with (
        tqdm(
            total=len(runs),
            disable=not sys.stderr.isatty(),
            bar_format="{bar:20} {n_fmt}/{total_fmt} [{elapsed}]{postfix}",
            leave=False,
        ) as bar,
        ThreadPoolExecutor(limits.jobs) as pool,
    ):
        waiting = {pool.submit(run): run for run in runs}
        failures: list[str] = []
        try:
            pending = set(waiting)
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in done:
                    if failure := future.result():
                        failures.append(failure)
                    bar.update()
                bar.set_postfix_str(", ".join(run.cell for run in runs if run.cell))
        finally:
            for run in runs:
                run.stopping.set()
    if failures:
        raise UserError("\n".join(failures))


class _Run:
    """One notebook on its way: waits for its lock, runs in a child, is published or kept aside."""

    def __init__(
        self, project: Project, job: Job, limits: Limits, force: bool, server: str | None
    ) -> None:
        self.project, self.job, self.limits, self.force = project, job, limits, force
        self.server = server
        self.stopping = threading.Event()
        self.cell = ""  #: shown while it runs
        self._waited = False

    def __call__(self) -> str | None:
        """Run; what went wrong in one line, or None."""
        try:
            with exclusive(self.job.files.lock, self._wait):
                if self.stopping.is_set():
                    return None
                return self._run()
        except _Failed:  # stopped while it waited
            return None
        finally:
            self.cell = ""

    def _wait(self, holder: str) -> None:
        if self.stopping.is_set():
            raise _Failed
        if not self._waited:
            self._say(f"waiting for {holder}, which is running it")
        self._waited = True

    def _run(self) -> str | None:
        job, started = self.job, time.monotonic()
        finished = self._waited and why_stale(self.project, job.files, job.inputs) is None
        if finished and not self.force:
            self._say("was finished by the other process")
            return None
        for torn in job.files.directory.glob(f".{job.name}.*.tmp"):  # of a killed process
            torn.unlink(missing_ok=True)
        if not sys.stderr.isatty():
            self._say("running")
        with tempfile.TemporaryDirectory(prefix="analysis-run-") as scratch:
            output = Path(scratch) / "notebook.ipynb"
            try:
                self._execute(Path(scratch), output)
                self._publish(Path(scratch), output, time.monotonic() - started)
            except (_Failed, UserError, OSError) as error:
                if self.stopping.is_set():
                    return None
                self._say("failed")
                return f"{job.name}: {error}{self._keep(output, str(error))}"
        self._say(f"done in {time.monotonic() - started:.1f} s")
        return None

    def _execute(self, scratch: Path, output: Path) -> None:
        """Let papermill run the notebook, in a process of its own; it saves it at every cell.

        Raises:
            _Failed: it did not come to its end; names the cell.
        """
        _install_kernel(scratch, self.project.root, self.server)
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
        environment = _environment(
            PYTHONPATH=str(Path(analysis.__file__).parents[1]),
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
                    env=environment,
                ) as process,
            ):
                self._watch(process, output)
            if process.returncode == 0:
                return
            error = (scratch / "said").read_text(encoding="utf-8", errors="replace")
            # Two kernels that start at once can draw the same port, and then one never answers.
            if last or "Kernel didn't respond" not in error:
                raise _Failed(self._why(output, process.returncode, error))

    def _why(self, output: Path, status: int, error: str) -> str:
        """What ended papermill: a cell, the kernel, or something before or beside them."""
        where, cells = _where(output), _cells(output)
        if "\nnbclient.exceptions.CellTimeoutError" in error:
            return f"{where} ran longer than the limit of {self.limits.timeout:g} s"
        if "\nnbclient.exceptions.DeadKernelError" in error:
            return f"the kernel died in {where}"
        for shown in cells[_running(cells)].get("outputs", ()) if cells else ():
            if shown["output_type"] == "error":
                lines = [line.strip() for line in shown["evalue"].strip().splitlines()]
                # Of a refused value pydantic's first line says neither which nor why.
                said = lines[1:3] if shown["ename"] == "ValidationError" else lines[:1]
                return ": ".join([f"{where} raised {shown['ename']}", *said])
        last = "".join(f": {line}" for line in error.strip().splitlines()[-1:])
        return f"{where} ended its runner (exit {status}){last}"

    def _watch(self, process: subprocess.Popen[Any], output: Path) -> None:
        """Wait for papermill; stop it when it is asked to, falls silent or fills the disk."""
        changed, heard = 0, time.monotonic()
        while process.poll() is None and not self.stopping.wait(0.1):
            with contextlib.suppress(OSError):
                state = output.stat()
                if state.st_mtime_ns != changed:
                    changed, heard = state.st_mtime_ns, time.monotonic()
                    if sys.stderr.isatty() and (cells := _cells(output)):
                        self.cell = f"{self.job.name} {_running(cells) + 1}/{len(cells)}"
                if state.st_size > 2 * self.limits.cap and (cells := _cells(output)):
                    self._refuse_size(cells)
            silent = time.monotonic() - heard
            if silent > self.limits.timeout + SILENCE_GRACE_SECONDS:
                raise _Failed(f"{_where(output)} fell silent for {silent:.0f} s")
        if self.stopping.is_set():
            raise _Failed("stopped")

    def _refuse_size(self, cells: list[dict[str, Any]]) -> None:
        """Name the cell with the longest outputs."""
        index = max(range(len(cells)), key=lambda i: len(json.dumps(cells[i].get("outputs", []))))
        cap = f"{self.limits.cap / 1e6:g} MB"
        raise _Failed(f"{_cell_label(cells, index)} wrote more than {cap} of output")

    def _publish(self, scratch: Path, output: Path, seconds: float) -> None:
        """Put a finished run into place, its provenance last, and forget earlier failures."""
        job = self.job
        if job.inputs["notebook"] != hash_source(read_notebook(job.source, job.label)):
            raise _Failed(f"{job.label} changed while it ran; run it again")
        notebook = clean(read_notebook(output, job.name))
        data = (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()
        if len(data) > self.limits.cap:
            self._refuse_size(_cells(output))
        for problem in output_problems(notebook):
            raise _Failed(problem)
        log = (scratch / "reads").read_text(encoding="utf-8").splitlines()
        device = [line.removeprefix("device: ") for line in log if line.startswith("device: ")]
        provenance = Provenance(
            notebook=job.label,
            parameters=dict(job.parameters),
            inputs=dict(job.inputs),
            reads=reads_sha256(set(log[: len(log) - len(device)]), self.project.root),
            output=sha256_bytes(data),
            device=device[0] if device else f"CPU ({processor_name()})",
            threads=THREADS,
            versions=versions(),
            platform=platform.platform(),
            wall_seconds=round(seconds, 1),
            finished_at=datetime.now(UTC).replace(microsecond=0),
        )
        replace_file(job.files.output, data)
        write_provenance(job.files.provenance, provenance)
        for path in (job.files.failed, job.files.failure):
            path.unlink(missing_ok=True)

    def _keep(self, output: Path, reason: str) -> str:
        """Keep what a failed run left, aside, with the reason; where, as the end of a message."""
        files = self.job.files
        files.failed.parent.mkdir(exist_ok=True)
        record = {"reason": reason, "at": time.time()}
        with contextlib.suppress(UserError):
            replace_file(files.failure, (json.dumps(record) + "\n").encode())
            notebook = clean(read_notebook(output, ""))
            replace_file(files.failed, (json.dumps(notebook, indent=1) + "\n").encode())
            return f"; see {self.project.relative(files.failed)}"
        return ""

    def _say(self, text: str) -> None:
        tqdm.write(f"{self.job.name}  {text}", file=sys.stderr)
        sys.stderr.flush()


def _environment(**extra: str) -> dict[str, str]:
    """Of what runs notebooks: with it sets have one order."""
    return pinned_environment(PYTHONHASHSEED="0", **extra)


def _install_kernel(scratch: Path, root: Path, server: str | None) -> None:
    """Write a kernel of this very interpreter, whatever others there are."""
    program = [kernel.__file__] if server is None else asking(server)
    spec = {
        "argv": [
            *(sys.executable, "-P", *program, str(scratch / "reads"), str(root)),
            *("-f", "{connection_file}"),
        ],
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "env": {"PYTHONPATH": str(root)},
    }
    folder = scratch / "kernels" / KERNEL
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")


def _cells(output: Path) -> list[dict[str, Any]]:
    """The notebook's own cells in papermill's working copy, as far as it is whole."""
    try:
        cells = json.loads(output.read_bytes())["cells"]
    except (OSError, ValueError, KeyError):
        return []
    added = {"injected-parameters", "papermill-error-cell-tag"}
    return [cell for cell in cells if added.isdisjoint(cell["metadata"].get("tags", ()))]


def _running(cells: list[dict[str, Any]]) -> int:
    """The last cell that papermill has started; -1 for none."""
    times = [cell["metadata"].get("papermill", {}).get("start_time") for cell in cells]
    return max((index for index, time in enumerate(times) if time), default=-1)


def _where(output: Path) -> str:
    """The cell that ran last, as a person counts them."""
    cells = _cells(output)
    index = _running(cells)
    return "the start of the kernel" if index < 0 else _cell_label(cells, index)


def _cell_label(cells: list[dict[str, Any]], index: int) -> str:
    first, *_ = "".join(cells[index]["source"]).strip().splitlines() or [""]
    return f"cell {index + 1} (`{first[:80]}`)"


def clean(notebook: dict[str, Any]) -> dict[str, Any]:
    """Drop what differs between two equal runs: times, durations and paths."""
    papermill = notebook["metadata"].get("papermill", {})
    notebook["metadata"]["papermill"] = {
        key: papermill[key] for key in ("parameters", "version") if key in papermill
    }
    for cell in notebook["cells"]:
        metadata = cell["metadata"]
        for key in ("papermill", "execution"):
            metadata.pop(key, None)
        if metadata.get("tags") == []:  # papermill adds an empty list
            del metadata["tags"]
        if "injected-parameters" in metadata.get("tags", ()):
            cell["id"] = "injected-parameters"  # papermill draws a random one
    return notebook


def refresh_notebooks(project: Project, names: Sequence[str] = ()) -> list[Path]:
    """Copy the book's runs over their sources, without the tables of their figures; the sources
    that changed.

    Where the address begins to name a repository, they get the cell of
    `analysis.report.setup_cell`, and want another run.
    """
    jobs = plan(project, select_notebooks(project, names), directory=project.runs)
    for job, reason in stale_jobs(project, jobs):
        raise UserError(f"{job.name}: {reason}; run: analysis run {job.name}")
    changed = []
    for job in jobs:
        content = refreshed(project, job)
        if content != job.source.read_bytes():
            replace_file(job.source, content)
            changed.append(job.source)
    return changed


def refreshed(project: Project, job: Job) -> bytes:
    """A notebook as it should be stored: the book's run of it."""
    notebook = read_notebook(job.files.output, project.relative(job.files.output))
    notebook["metadata"].pop("papermill", None)
    _drop_figure_data(notebook)
    notebook = with_setup(notebook, project)
    return (json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _drop_figure_data(notebook: dict[str, Any]) -> None:
    """Take the tables of figures out of a notebook: a run of it makes them again."""
    from analysis.report.figure_data import KEY

    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            output.get("metadata", {}).get("image/png", {}).pop(KEY, None)
