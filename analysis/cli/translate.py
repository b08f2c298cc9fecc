"""``analysis translate``: the Chinese catalogues, brought up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from analysis.report.project import find_project
from analysis.report.translation import CODE, catalogue_path, catalogues, problems, update


def translate(pages: tuple[str, ...] = (), /) -> None:
    """Write the paragraphs that changed into book/locale, and say what is left to translate.

    Args:
        pages: names of pages such as ``answer`` or ``01_estimators``; by default those that have a
            catalogue.
    """
    project = find_project(Path.cwd())
    for page in pages or catalogues(project):
        total, missing = update(project, page)
        place = f" in {project.relative(catalogue_path(project, page))}" if missing else ""
        print(f"{CODE} {page}: {total} pieces, {missing} to translate{place}", file=sys.stderr)
    for problem in problems(project):
        print(problem)
