"""Where a finished run goes: the book, the failed copies, or back into the committed notebooks."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import time
from pathlib import Path

from analysis.errors import Refused
from analysis.files import replace_file, sha256_file
from analysis.report.jobs import Job, plan, stale_jobs
from analysis.report.processes import THREADS
from analysis.report.project import Project, select_notebooks
from analysis.report.provenance import (
    SCHEMA,
    Provenance,
    RunFiles,
    hash_source,
    installed_version,
    read_notebook,
    write_provenance,
)

VERSIONS = ("torch", "numpy", "papermill")


def publish(job: Job, device: str, seconds: float) -> None:
    """Move a finished run into place, its provenance last, and forget earlier failures."""
    finished = temporary(job.files.output)
    if job.inputs["notebook"] != hash_source(read_notebook(job.source, job.label)):
        raise Refused(f"{job.label} changed while it ran; run it again")
    provenance = Provenance(
        schema=SCHEMA,
        notebook=job.label,
        parameters=dict(job.parameters),
        inputs=dict(job.inputs),
        output=sha256_file(finished),
        device=device if device != "cpu" else f"CPU ({processor_name()})",
        threads=THREADS,
        versions={"python": platform.python_version()}
        | {name: installed_version(name) for name in VERSIONS},
        platform=platform.platform(),
        wall_seconds=round(seconds, 1),
        finished_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    os.replace(finished, job.files.output)
    write_provenance(job.files.provenance, provenance)
    for path in (job.files.failed, job.files.failure):
        path.unlink(missing_ok=True)


def keep_failed(job: Job, reason: str) -> Path | None:
    """Keep the copy of a failed run aside with its reason; the path of the copy, if any."""
    record = {"reason": reason, "at": time.time()}
    with contextlib.suppress(Refused):
        replace_file(job.files.failure, (json.dumps(record) + "\n").encode())
    copy = temporary(job.files.failed)
    if not copy.is_file():
        return None
    os.replace(copy, job.files.failed)
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


def temporary(path: Path) -> Path:
    """Where this process writes what is to become ``path``."""
    return path.with_name(f".{path.stem}.{os.getpid()}.tmp")


def sweep(files: RunFiles) -> None:
    """Remove what killed runs of this notebook left; the caller holds its lock."""
    for directory in (files.directory, files.failed.parent):
        for path in directory.glob(f".{files.name}.*.tmp"):
            path.unlink(missing_ok=True)
