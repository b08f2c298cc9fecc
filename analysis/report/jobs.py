"""What there is to run: notebooks with checked parameters, and whether their runs are current."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.report.parameters import (
    changed_parameters,
    declared_parameters,
    resolve_parameters,
)
from analysis.report.project import Project
from analysis.report.provenance import (
    RunFiles,
    inputs_of,
    read_notebook,
    shared_inputs,
    why_not_current,
)


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
