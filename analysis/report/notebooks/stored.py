"""What of a run is stored: nothing that differs between two equal runs, and no figure's tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.report.notebooks.jobs import Job, plan, stale_jobs
from analysis.report.project import Project, select_notebooks
from analysis.report.provenance import read_notebook
from analysis.report.setup_cell import with_setup
from kl_term.errors import UserError
from kl_term.files import replace_file


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
