"""What is to be run: notebooks with checked parameters, and why a run is not current."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.report.parameters import changed_parameters, declared_parameters, resolve_parameters
from analysis.report.processes import available_cores
from analysis.report.project import Project
from analysis.report.provenance import RunFiles, inputs_of, read_notebook, why_stale

CELL_TIMEOUT_SECONDS = 1200.0
OUTPUT_CAP_BYTES = 20_000_000


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
