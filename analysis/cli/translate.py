"""``analysis translate``: the catalogues of the other languages, brought up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from analysis.report.project import find_project
from analysis.report.translation import LANGUAGES, catalogues, problems, update


def translate(pages: tuple[str, ...] = (), /) -> None:
    """Write the paragraphs that changed into book/locale, and say what is left to translate.

    Args:
        pages: names of pages such as ``answer`` or ``01_estimators``; by default those that have a
            catalogue.
    """
    project = find_project(Path.cwd())
    for language in LANGUAGES:
        for page in pages or catalogues(project, language):
            total, missing = update(project, language, page)
            print(
                f"{language.code} {page}: {total} pieces, {missing} to translate", file=sys.stderr
            )
        for problem in problems(project, language):
            print(problem)
