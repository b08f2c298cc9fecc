"""Running notebooks: a few at a time, each published when it succeeds."""

from __future__ import annotations

import contextlib
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path

from tqdm import tqdm

from analysis.freshness import processor_name, reads_sha256
from analysis.report.kernel_server import kernel_server
from analysis.report.notebooks.execution import Execution, Failed, environment, too_long
from analysis.report.notebooks.jobs import Job, Limits
from analysis.report.notebooks.stored import clean
from analysis.report.notebooks.working_copy import cells_of
from analysis.report.pages import output_problems
from analysis.report.processes import THREADS, exclusive
from analysis.report.project import Project
from analysis.report.provenance import (
    Provenance,
    hash_source,
    read_notebook,
    versions,
    why_stale,
    write_provenance,
)
from kl_term.errors import UserError
from kl_term.files import replace_file, require_writable, sha256_bytes

#: From so many notebooks on, importing once for all kernels saves time.
WORTH_A_SERVER = 3


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
            variables = environment(PYTHONPATH=str(project.root))
            server = serving.enter_context(kernel_server(variables))
        executions = (Execution(project, job, limits, server) for job in jobs)
        _run_all([_Run(execution, force) for execution in executions], limits)


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
                bar.set_postfix_str(", ".join(filter(None, (run.execution.cell for run in runs))))
        finally:
            for run in runs:
                run.execution.stopping.set()
    if failures:
        raise UserError("\n".join(failures))


class _Run:
    """One notebook on its way: waits for its lock, runs in a child, is published or kept aside."""

    def __init__(self, execution: Execution, force: bool) -> None:
        self.execution, self.force = execution, force
        self.project, self.job = execution.project, execution.job
        self._waited = False

    def __call__(self) -> str | None:
        """Run; what went wrong in one line, or None."""
        try:
            with exclusive(self.job.files.lock, self._wait):
                if self.execution.stopping.is_set():
                    return None
                return self._run()
        except Failed:  # stopped while it waited
            return None
        finally:
            self.execution.cell = ""

    def _wait(self, holder: str) -> None:
        if self.execution.stopping.is_set():
            raise Failed
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
                self.execution(Path(scratch), output)
                self._publish(Path(scratch), output, time.monotonic() - started)
            except (Failed, UserError, OSError) as error:
                if self.execution.stopping.is_set():
                    return None
                self._say("failed")
                return f"{job.name}: {error}{self._keep(output, str(error))}"
        self._say(f"done in {time.monotonic() - started:.1f} s")
        return None

    def _publish(self, scratch: Path, output: Path, seconds: float) -> None:
        """Put a finished run into place, its provenance last, and forget earlier failures."""
        job = self.job
        if job.inputs["notebook"] != hash_source(read_notebook(job.source, job.label)):
            raise Failed(f"{job.label} changed while it ran; run it again")
        notebook = clean(read_notebook(output, job.name))
        data = (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()
        if len(data) > self.execution.limits.cap:
            raise too_long(cells_of(output), self.execution.limits)
        for problem in output_problems(notebook):
            raise Failed(problem)
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
