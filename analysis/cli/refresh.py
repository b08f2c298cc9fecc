"""``analysis refresh``: the book's runs back into the committed notebooks."""

from __future__ import annotations

import sys
from pathlib import Path

from analysis.report.address import refresh_address
from analysis.report.notebooks.stored import refresh_notebooks
from analysis.report.project import find_project
from analysis.report.run_figures import refresh_copies


def refresh(names: tuple[str, ...] = (), /) -> None:
    """Copy the executed notebooks, with their outputs, over their sources in notebooks/, and those
    of their figures that the README shows; bring CITATION.cff and the README's links up to date.

    Refuses runs that are not current or were made with other parameters than the defaults.

    Args:
        names: notebooks as number, name or path; all by default.
    """
    project = find_project(Path.cwd())
    paths = refresh_notebooks(project, names)
    paths += refresh_copies(project.book / "_static" / "figures", project.notebooks)
    paths += refresh_address(project)
    for path in paths:
        print(f"refreshed {project.relative(path)}", file=sys.stderr)
