"""Running the notebooks: what to run is planned and checked first, then executed and published."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import selectors
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.report.errors import Refused
from analysis.report.files import replace_file, require_writable, sha256_file
from analysis.report.parameters import (
    changed_parameters,
    declared_parameters,
    resolve_parameters,
)
from analysis.report.processes import THREADS, available_cores
from analysis.report.project import Project, select_notebooks
from analysis.report.provenance import (
    SCHEMA,
    Provenance,
    RunFiles,
    inputs_of,
    installed_version,
    read_notebook,
    shared_inputs,
    why_not_current,
    write_provenance,
)

OUTPUT_CAP_BYTES = 20_000_000
CELL_TIMEOUT_SECONDS = 1200.0
_VERSIONS = ("torch", "numpy", "papermill")


@dataclass(frozen=True, eq=False)
class Job:
    """One notebook with its checked parameters.

    Attributes:
        parameters: every parameter.
        overrides: those that differ from their defaults.
        inputs: hashes of all that the run is a function of.
    """

    source: Path
    label: str
    parameters: Mapping[str, Any]
    overrides: Mapping[str, Any]
    inputs: Mapping[str, str]
    files: RunFiles

    @property
    def name(self) -> str:
        return self.source.stem


@dataclass(frozen=True)
class Limits:
    """How much a run may use."""

    jobs: int = field(default_factory=lambda: min(2, available_cores()))
    timeout: float = CELL_TIMEOUT_SECONDS
    cap: int = OUTPUT_CAP_BYTES


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

    Raises:
        Refused: a notebook or a parameter is not acceptable.
    """
    shared = shared_inputs(project)
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
                inputs_of(notebook, parameters, shared),
                RunFiles(directory, source.stem),
            )
        )
    return jobs


def stale_jobs(jobs: Iterable[Job]) -> list[tuple[Job, str]]:
    """The jobs whose run is not current, each with the reason."""
    reasons = ((job, why_not_current(job.files, job.inputs)) for job in jobs)
    return [(job, reason) for job, reason in reasons if reason is not None]


def run_jobs(
    project: Project,
    jobs: Iterable[Job],
    limits: Limits,
    *,
    force: bool = False,
    command: Callable[[], list[str]] | None = None,
) -> None:
    """Execute ``jobs``, a few at a time, and publish each that succeeds.

    Args:
        force: also run what is current.
        command: the child program, `analysis.report.execution.runner_command` by default.

    Raises:
        Refused: a place is not writable, or a notebook failed; the others still finished, and
            earlier outputs of the failed ones are untouched.
    """
    from analysis.report.execution import runner_command
    from analysis.report.progress import Progress

    jobs = list(jobs)
    for directory in {job.files.directory for job in jobs}:
        require_writable(directory)
    for job in jobs:
        if job.files.output.is_dir() or job.files.provenance.is_dir():
            raise Refused(f"{job.files.output}: a folder is in the way; remove it")
    progress = Progress(job.name for job in jobs)
    queue = _Queue(project, jobs, limits, force, command or runner_command, progress)
    try:
        failures = queue.drain()
    finally:
        queue.abandon()
        progress.close()
    if failures:
        raise Refused("\n".join(failures))


class _Queue:
    """Waiting and running jobs; a single thread listens to all children."""

    def __init__(
        self,
        project: Project,
        jobs: list[Job],
        limits: Limits,
        force: bool,
        command: Callable[[], list[str]],
        progress: Any,
    ) -> None:
        self.project, self.limits, self.force = project, limits, force
        self.command, self.progress = command, progress
        self.waiting = jobs
        self.running: dict[Job, tuple[Any, Any]] = {}
        self.announced: set[str] = set()
        self.failures: list[str] = []
        self.selector = selectors.DefaultSelector()

    def drain(self) -> list[str]:
        while self.waiting or self.running:
            self._start_some()
            for key, _ in self.selector.select(timeout=0.2):
                job = key.data
                for event in self.running[job][0].pump():
                    if event["event"] == "cell":
                        self.progress.cell(job.name, event["index"], event["count"])
            for job, (execution, _) in list(self.running.items()):
                execution.check_silence()
                if execution.result is not None:
                    self._settle(job)
        return self.failures

    def abandon(self) -> None:
        """Stop what is still running; published outputs stay as they are."""
        for job in list(self.running):
            self._release(job)
        self.selector.close()

    def _start_some(self) -> None:
        for job in list(self.waiting):
            if len(self.running) >= self.limits.jobs:
                return
            self._start(job)

    def _start(self, job: Job) -> None:
        from analysis.report.execution import Execution, Request
        from analysis.report.locking import Claim

        claim = Claim(job.files.lock)
        if not claim.acquire():
            if job.name not in self.announced:
                self.announced.add(job.name)
                self.progress.note(f"{job.name}: waiting for {claim.holder()}, which is running it")
            return
        self.waiting.remove(job)
        if job.name in self.announced and why_not_current(job.files, job.inputs) is None:
            claim.release()
            self.progress.ended(job.name, "was finished by the other process")
            return
        try:
            _sweep(job.files)
            job.files.failed.parent.mkdir(exist_ok=True)
            execution = Execution(
                Request(
                    source=str(job.source),
                    parameters=dict(job.overrides),
                    output=str(_temporary(job.files.output)),
                    failed=str(_temporary(job.files.failed)),
                    cwd=str(self.project.notebooks),
                    pythonpath=str(self.project.root),
                    timeout=self.limits.timeout,
                    cap=self.limits.cap,
                ),
                self.command,
            )
        except BaseException:
            claim.release()
            raise
        self.running[job] = (execution, claim)
        self.selector.register(execution.stdout, selectors.EVENT_READ, job)
        self.progress.started(job.name)

    def _settle(self, job: Job) -> None:
        execution = self.running[job][0]
        try:
            if execution.result["event"] == "done":
                publish(job, execution.result["device"], execution.seconds)
                self.progress.ended(job.name, f"done in {execution.seconds:.1f} s")
            else:
                self._fail(job, execution.result["message"])
        except (Refused, OSError) as error:
            self._fail(job, str(error))
        finally:
            self._release(job)

    def _fail(self, job: Job, message: str) -> None:
        kept = keep_failed(job, message)
        where = f"; see {self.project.relative(kept)}" if kept else ""
        self.failures.append(f"{job.name}: {message}{where}")
        self.progress.ended(job.name, "failed")

    def _release(self, job: Job) -> None:
        execution, claim = self.running.pop(job)
        self.selector.unregister(execution.stdout)
        execution.close()
        _sweep(job.files)
        claim.release()


def publish(job: Job, device: str, seconds: float) -> None:
    """Move a finished run into place, its provenance last, and forget earlier failures."""
    temporary = _temporary(job.files.output)
    if (
        job.inputs["notebook"]
        != inputs_of(read_notebook(job.source, job.label), {}, {})["notebook"]
    ):
        raise Refused(f"{job.label} changed while it ran; run it again")
    provenance = Provenance(
        schema=SCHEMA,
        notebook=job.label,
        parameters=dict(job.parameters),
        inputs=dict(job.inputs),
        output=sha256_file(temporary),
        device=device if device != "cpu" else f"CPU ({processor_name()})",
        threads=THREADS,
        versions={"python": platform.python_version()}
        | {name: installed_version(name) for name in _VERSIONS},
        platform=platform.platform(),
        wall_seconds=round(seconds, 1),
        finished_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    os.replace(temporary, job.files.output)
    write_provenance(job.files.provenance, provenance)
    for path in (job.files.failed, job.files.failure):
        path.unlink(missing_ok=True)


def keep_failed(job: Job, reason: str) -> Path | None:
    """Keep the copy of a failed run aside with its reason; the path of the copy, if any."""
    record = {"reason": reason, "at": time.time()}
    with contextlib.suppress(Refused):
        replace_file(job.files.failure, (json.dumps(record) + "\n").encode())
    temporary = _temporary(job.files.failed)
    if not temporary.is_file():
        return None
    os.replace(temporary, job.files.failed)
    return job.files.failed


def refresh_notebooks(project: Project) -> list[Path]:
    """Copy the book's runs over their sources; the sources that changed.

    Raises:
        Refused: a run is not current, or not at its notebook's default parameters.
    """
    jobs = plan(project, select_notebooks(project, ()), directory=project.runs)
    for job, reason in stale_jobs(jobs):
        raise Refused(f"{job.name}: {reason}; run: analysis run {job.name}")
    refreshed = []
    for job in jobs:
        notebook = read_notebook(job.files.output, project.relative(job.files.output))
        notebook["metadata"].pop("papermill", None)
        text = json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        if text.encode() != job.source.read_bytes():
            replace_file(job.source, text.encode())
            refreshed.append(job.source)
    return refreshed


def processor_name() -> str:
    """The processor as its maker calls it, where the system says so."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.stem}.{os.getpid()}.tmp")


def _sweep(files: RunFiles) -> None:
    """Remove what killed runs of this notebook left; the caller holds its lock."""
    for directory in (files.directory, files.failed.parent):
        for path in directory.glob(f".{files.name}.*.tmp"):
            path.unlink(missing_ok=True)
