"""Linting prose: no number typed by hand, and no quotation of a number that no run recorded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from analysis.report.markdown import code_spans, mask_code, mask_markup
from analysis.report.project import Project
from analysis.report.provenance import read_notebook
from analysis.report.records import read_records

_NUMBER = re.compile(
    r"""(?<![\w.])(?:
        (?:\d[\d,]*)?\.\d+(?:[eE][-+\u2212]?\d+)?(?:\s?\\?%)?   # 0.04, .5, 1.5e-3, 12.5 %
      | \d[\d,]*(?:\s?\\?%|\s?per\s?cent\b)                 # 12 %, 12 percent
      | \d+[eE][-+\u2212]?\d+\b                                  # 1e-3
    )""",
    re.VERBOSE,
)
_GLUE_DIRECTIVE = re.compile(r"^[ \t]*(?:`{3,}|:{3,})\{glue:\w*\}[ \t]+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Quotation:
    """A ``{glue}`` role or directive: ``key`` of the page at ``path`` (empty: this page)."""

    line: int
    path: str
    key: str


def typed_numbers(text: str, *, maths: bool) -> Iterator[tuple[int, str]]:
    """The decimals and percentages typed in MyST prose, with their lines.

    Args:
        maths: whether numbers inside formulas are allowed.
    """
    masked = mask_markup(mask_code(text, maths=maths), maths=maths)
    for match in _NUMBER.finditer(masked):
        yield _line(text, match.start()), match.group()


def quotations(text: str) -> Iterator[Quotation]:
    """The recorded numbers that MyST prose quotes."""
    for start, role, content in code_spans(text):
        if role == "glue" or role.startswith("glue:"):
            yield _quotation(_line(text, start), content)
    for match in _GLUE_DIRECTIVE.finditer(text):
        yield _quotation(_line(text, match.start(1)), match[1])


def prose_problems(project: Project, pages: Mapping[Path, Path]) -> list[str]:
    """Everything wrong with the prose of ``pages``, one line each.

    Args:
        pages: for each page its source: itself for Markdown, the notebook for a run.
    """
    return [
        problem
        for page, source in pages.items()
        for label, text in _prose_of(project, source)
        for problem in _problems(project, page, label, text, maths=source.suffix == ".ipynb")
    ]


def _prose_of(project: Project, source: Path) -> Iterator[tuple[str, str]]:
    """The pieces of prose in a file, each with the label to put before a line number."""
    label = project.relative(source)
    if source.suffix != ".ipynb":
        yield label, source.read_text(encoding="utf-8")
        return
    for index, cell in enumerate(read_notebook(source, label)["cells"], start=1):
        if cell["cell_type"] == "markdown":
            yield f"{label}:cell {index}", "".join(cell["source"])
        caption = _caption(cell)
        if caption:
            yield f"{label}:cell {index} caption", caption


def _caption(cell: Mapping[str, Any]) -> str:
    figure = cell.get("metadata", {}).get("mystnb", {}).get("figure", {})
    return str(figure.get("caption", "")) if isinstance(figure, dict) else ""


def _problems(project: Project, page: Path, label: str, text: str, *, maths: bool) -> Iterator[str]:
    for line, number in typed_numbers(text, maths=maths):
        yield (
            f"{label}:{line}: the number {number} is typed by hand; glue it from a run, "
            f"or write {{given}}`{number}` if it is a setting"
        )
    for quotation in quotations(text):
        problem = _quotation_problem(project, page, quotation)
        if problem:
            yield f"{label}:{quotation.line}: {problem}"


def _quotation_problem(project: Project, page: Path, quotation: Quotation) -> str | None:
    target = _resolve(project, page, quotation.path) if quotation.path else page
    if target.parent != project.runs or target.suffix != ".ipynb":
        return (
            f"{quotation.key!r} is quoted from {project.relative(target)}, which is no run; "
            "write path/to/book/_run/NAME.ipynb::key:s"
        )
    records = read_records(project, target.stem)
    if records is None:
        return f"{quotation.key!r} is quoted from {project.relative(target)}, which does not exist"
    if quotation.key not in records:
        return f"{target.stem} records no {quotation.key!r}"
    return None


def _resolve(project: Project, page: Path, path: str) -> Path:
    base = project.root if path.startswith("/") else page.parent
    parts: list[str] = []
    for part in PurePosixPath(path.lstrip("/")).parts:
        if part == "..":
            if parts:
                parts.pop()
            else:
                base = base.parent
        else:
            parts.append(part)
    return base.joinpath(*parts)


def _quotation(line: int, content: str) -> Quotation:
    path, separator, rest = content.strip().rpartition("::")
    key = (rest if separator else content.strip()).partition(":")[0]
    return Quotation(line, path, key)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
