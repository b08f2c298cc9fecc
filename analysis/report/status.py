"""The page that says when, where and with what each result was computed."""

from __future__ import annotations

import json

from analysis.experiments.manifests import manifest_of, recorded_folders
from analysis.report.generated import render
from analysis.report.pages import run_pages
from analysis.report.parameters import changed_parameters, declared_parameters
from analysis.report.project import Project
from analysis.report.provenance import Provenance, read_notebook, read_provenance


def status_page(project: Project) -> str:
    """The status page as MyST text."""
    runs = [
        (run.name, provenance)
        for run in run_pages(project)
        if (provenance := read_provenance(run.provenance)) is not None
    ]
    return render(
        "status.md",
        runs=[
            {
                "name": name,
                "made": made,
                "took": _duration(made.wall_seconds),
                "changed": _changes(project, name, made),
                "reads": _reads(made),
            }
            for name, made in runs
        ],
        recorded=[
            (project.relative(folder), manifest_of(folder))
            for folder in recorded_folders(project.results)
        ],
    )


def _changes(project: Project, name: str, provenance: Provenance) -> dict[str, str]:
    """The parameters that were not at their defaults."""
    source = project.root / provenance.notebook
    declared = declared_parameters(read_notebook(source, provenance.notebook), name)
    changed = changed_parameters(declared, provenance.parameters)
    return {key: json.dumps(value) for key, value in changed.items()}


def _reads(provenance: Provenance) -> list[str]:
    """The recorded results, and other files, that a run opened."""
    parts = (name.split("/") for name in provenance.reads)
    found = {"/".join(part[:2]) if part[0] == "results" else "/".join(part) for part in parts}
    return sorted(found)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
