"""The page that says when, where and with what each result was computed."""

from __future__ import annotations

import json
from typing import Any

from analysis.experiments.manifests import manifest_of, recorded_folders
from analysis.report.pages import run_pages
from analysis.report.parameters import changed_parameters, declared_parameters
from analysis.report.project import Project
from analysis.report.provenance import Provenance, read_notebook, read_provenance
from analysis.report.tables import as_markdown

_INTRODUCTION = """\
# Runs behind this book

Every number and figure comes from one of the runs below. A page does not build if, since its run,
its notebook, its parameters, the code that it imports, a file that it read or the locked
environment changed.
"""
_NO_RESULTS = "No recorded result is used: every page was computed by its own run.\n"


def status_page(project: Project) -> str:
    """The status page as MyST text."""
    runs = [
        (run.name, provenance)
        for run in run_pages(project)
        if (provenance := read_provenance(run.provenance)) is not None
    ]
    return "\n".join(
        [
            _INTRODUCTION,
            as_markdown(
                ("Page", "Profile", "Took", "Finished", "Computed on"),
                (_run_row(name, provenance) for name, provenance in runs),
            ),
            "## Parameters\n",
            as_markdown(
                ("Page", "Changed from the defaults"),
                ((_link(n), _changes(project, n, p)) for n, p in runs),
            ),
            "## Files that a page reads\n",
            as_markdown(("Page", "Read"), ((_link(n), _reads(p)) for n, p in runs)),
            "## Versions\n",
            as_markdown(
                ("Page", "Versions", "Platform", "Threads"),
                ((_link(n), _versions(p.versions), p.platform, str(p.threads)) for n, p in runs),
            ),
            "## Recorded results\n",
            _recorded(project),
        ]
    )


def _run_row(name: str, provenance: Provenance) -> tuple[str, ...]:
    return (
        _link(name),
        provenance.profile,
        _duration(provenance.wall_seconds),
        f"{provenance.finished_at:%Y-%m-%d %H:%M} UTC",
        provenance.device,
    )


def _changes(project: Project, name: str, provenance: Provenance) -> str:
    source = project.root / provenance.notebook
    declared = declared_parameters(read_notebook(source, provenance.notebook), name)
    changed = changed_parameters(declared, provenance.parameters)
    return ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in changed.items()) or "none"


def _reads(provenance: Provenance) -> str:
    """The recorded results, and other files, that a run opened."""
    parts = (name.split("/") for name in provenance.reads)
    found = {"/".join(part[:2]) if part[0] == "results" else "/".join(part) for part in parts}
    return ", ".join(f"`{name}`" for name in sorted(found)) or "none"


def _recorded(project: Project) -> str:
    directories = recorded_folders(project.results)
    if not directories:
        return _NO_RESULTS
    manifests = [(directory, manifest_of(directory)) for directory in directories]
    return as_markdown(
        ("Folder", "Preset", "Seeds", "Computed on", "Versions"),
        ((f"`{project.relative(d)}`", *_manifest_row(manifest)) for d, manifest in manifests),
    )


def _manifest_row(manifest: dict[str, Any]) -> tuple[str, ...]:
    return (
        manifest["preset"],
        str(len(manifest["seeds"])),
        manifest["device"],
        _versions(manifest["versions"]),
    )


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _link(name: str) -> str:
    return f"{{doc}}`/book/_run/{name}`"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
