"""``analysis refresh``: the book's runs back into the committed notebooks."""

from __future__ import annotations

import sys
from pathlib import Path

from analysis.report.project import find_project
from analysis.report.publication import refresh_notebooks


def refresh() -> None:
    """Copy the executed notebooks, with their outputs, over their sources in notebooks/.

    Refuses runs that are not current or were made with other parameters than the defaults.
    """
    project = find_project(Path.cwd())
    for path in refresh_notebooks(project):
        print(f"refreshed {project.relative(path)}", file=sys.stderr)
