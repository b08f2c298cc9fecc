"""Running notebooks: a few at a time, each in a process of its own, published when it succeeds."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from analysis.errors import Refused
from analysis.files import require_writable
from analysis.report.jobs import Job
from analysis.report.processes import available_cores
from analysis.report.project import Project
from analysis.report.provenance import why_not_current
from analysis.report.publication import keep_failed, publish, sweep, temporary

OUTPUT_CAP_BYTES = 20_000_000
CELL_TIMEOUT_SECONDS = 1200.0


@dataclass(frozen=True)
class Limits:
    """How much a run may use."""

    jobs: int = field(default_factory=lambda: min(2, available_cores()))
    timeout: float = CELL_TIMEOUT_SECONDS
    cap: int = OUTPUT_CAP_BYTES


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
        force: run what another process has just finished, too.
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
            self.progress.tick()
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
        finished = job.name in self.announced and why_not_current(job.files, job.inputs) is None
        if finished and not self.force:
            claim.release()
            self.progress.ended(job.name, "was finished by the other process")
            return
        try:
            sweep(job.files)
            job.files.failed.parent.mkdir(exist_ok=True)
            execution = Execution(
                Request(
                    source=str(job.source),
                    parameters=dict(job.overrides),
                    output=str(temporary(job.files.output)),
                    failed=str(temporary(job.files.failed)),
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
        sweep(job.files)
        claim.release()
