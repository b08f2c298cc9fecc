"""Functions, tests and sections that the book's tables point at: whether they exist, and where."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from analysis.errors import Refused
from analysis.report.equations import source_url
from analysis.report.project import Project
from analysis.report.sources import definitions, function_place

_PROOFS = ("thm-", "prop-", "lem-", "cor-", "def-", "rem-")


def missing_function(project: Project, field: str, name: str) -> str:
    """One line if no such function is in the package, else nothing."""
    if function_place(project, name) is None:
        return f"{field} names {name}, which is not in the package"
    return ""


def missing_test(project: Project, test: str) -> str:
    """One line if there is no test ``path::name``, else nothing."""
    path, _, name = test.partition("::")
    exists = name.partition("[")[0] in definitions(project.root / path)
    return "" if exists else f"no test {test}"


def missing_section(project: Project, section: str) -> str:
    """One line if there is no page, or no label on it, for ``page`` or ``page#label``."""
    page, _, label = section.partition("#")
    source = _page_source(project, page)
    if source is None:
        return f"no page {page}"
    if label and not re.search(rf"(?<![\w-]){re.escape(label)}(?![\w-])", source.read_text()):
        return f"{page} has no label {label}"
    return ""


def code_link(project: Project, name: str) -> str:
    """The function's own name, linked to its line.

    Raises:
        Refused: no such function.
    """
    place = function_place(project, name)
    if place is None:
        raise Refused(f"{name} is not in the package")
    path, line = place
    return f"[`{name.rpartition('.')[2]}`]({source_url(project.root)}/{path}#L{line})"


def tested_link(project: Project, test: str, text: str) -> str:
    """A text, linked to the test ``path::name``."""
    path, _, name = test.partition("::")
    line = definitions(project.root / path)[name.partition("[")[0]]
    return f"[{text}]({source_url(project.root)}/{path}#L{line})"


def section_link(section: str, labelled: Collection[str]) -> str:
    """A section ``page`` or ``page#label`` as the role that links it.

    Args:
        labelled: labels of equations.
    """
    page, _, label = section.partition("#")
    if label.startswith(_PROOFS):
        return f"{{prf:ref}}`{label}`"
    if label.startswith("fig-"):
        return f"{{numref}}`{label}`"
    if label in labelled:
        return f"equation {{eq}}`{label}`"
    if label:
        return f"{{ref}}`{label}`"
    return f"{{doc}}`/book/{page}`" if not page[:2].isdigit() else f"{{doc}}`/book/_run/{page}`"


def _page_source(project: Project, page: str) -> Path | None:
    for path in (project.notebooks / f"{page}.ipynb", project.book / f"{page}.md"):
        if path.is_file():
            return path
    return None
