"""Advice: what the pages tell a reader to do, each row once, under its theorem's conditions.

``book/advice.yaml`` has the rows, and the pages show them: ``{{ advice.ROW.FIELD }}``. A row marks
its conditions where it says them, ``[[fresh samples|on fresh ones]]`` or ``[[fresh samples]]``.
``book/conditions.yaml`` has, once, under which conditions each theorem holds, and for each
condition the test in which the statement breaks without it. A row that does not say a condition of
its theorem is refused, and so is a page that shows a row without the words that say it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from analysis.report.project import Project
from analysis.report.strict_yaml import load_yaml
from kl_term.errors import UserError, first_problem
from kl_term.schema import Schema

CONDITIONS, ADVICE = "conditions.yaml", "advice.yaml"
#: Fields of a row that hold prose.
TEXTS = ("when", "says", "where")
_MARK = re.compile(r"\[\[(?P<name>[^|\]]+)(?:\|(?P<words>[^\]]+))?\]\]")
SHOWN = re.compile(r"\{\{\s*advice\.(?P<row>\w+)\.(?P<field>\w+)\s*\}\}")
_BOX = re.compile(
    r"^(?P<fence>`{3,}|:{3,})\{prf:\w+\}[^\n]*\n:label:\s*(?P<label>[\w-]+)\n(?P<text>.*?)^(?P=fence)\s*$",
    re.MULTILINE | re.DOTALL,
)


class Conditions(Schema):
    """What each theorem needs."""

    names: dict[str, str] = Field(min_length=1)  #: condition -> what it means
    #: label, or label and item -> condition -> test in which the statement breaks without it
    theorems: dict[str, dict[str, str]] = Field(min_length=1)

    @model_validator(mode="after")
    def _known(self) -> Conditions:
        used = {name for needed in self.theorems.values() for name in needed}
        for name in sorted(used - set(self.names)):
            raise ValueError(f"{name!r} is not among the names")
        for name in sorted(set(self.names) - used):
            raise ValueError(f"no theorem needs {name!r}; delete it")
        return self


class Row(Schema):
    """One piece of advice; a note is a row that others stand ``under``."""

    says: str
    when: str = ""  #: the situation
    where: str = ""  #: the conditions that ``says`` has no room for
    theorems: list[str] = Field(default=[])  #: what it rests on: labels, or labels and items
    under: list[str] = Field(default=[])  #: notes on the same page, whose conditions are its own
    measured: str = ""  #: notebook that shows the runs it rests on
    names: dict[str, str] = Field(default={})  #: framework -> what it is called there

    def conditions(self) -> set[str]:
        """The conditions that its own texts say."""
        return {found for text in TEXTS for found in marked(getattr(self, text))}

    def fields(self) -> list[str]:
        """What a page can show of it: its texts, its theorems as ``proof``, and its names."""
        texts = [text for text in TEXTS if getattr(self, text)]
        names = [f"in_{framework.lower()}" for framework in self.names]
        return texts + ["proof"] * bool(self.theorems) + ["how"] * bool(names) + names


class Advice(Schema):
    """All rows, and what their theorems need."""

    conditions: Conditions
    notes: dict[str, Row]
    rows: dict[str, Row]

    def every(self) -> dict[str, Row]:
        """Notes and rows, by name."""
        return {**self.notes, **self.rows}


def marked(text: str) -> list[str]:
    """The names of the conditions that a text says."""
    return [match["name"] for match in _MARK.finditer(text)]


def said(text: str) -> str:
    """A text as it is read: each mark gives its words."""
    return " ".join(_MARK.sub(lambda mark: mark["words"] or mark["name"], text).split())


def load_advice(project: Project) -> Advice:
    """Every row, checked against theorems, tests and pages; what is wrong is said, a line each."""
    advice = Advice(
        conditions=_conditions(project),
        notes=_rows(project, "notes"),
        rows=_rows(project, "rows"),
    )
    problems = [
        *_evidence_problems(project, advice),
        *_row_problems(advice),
        *_page_problems(project, advice),
    ]
    if problems:
        raise UserError("\n".join(problems))
    return advice


def prose(project: Project) -> Iterator[tuple[str, str]]:
    """The texts of the rows, each with its label, for the check of typed numbers."""
    if (project.book / ADVICE).is_file():
        for part in ("notes", "rows"):
            for name, row in _rows(project, part).items():
                texts = (row.says, row.when, row.where, *row.names.values())
                yield from ((f"book/{ADVICE}: {name}", said(text)) for text in texts if text)


def _conditions(project: Project) -> Conditions:
    label = f"book/{CONDITIONS}"
    try:
        return Conditions.model_validate(load_yaml(project.book / CONDITIONS, label))
    except ValidationError as error:
        raise UserError(f"{label}: {first_problem(error)}") from None


def _rows(project: Project, part: str) -> dict[str, Row]:
    label = f"book/{ADVICE}"
    content = load_yaml(project.book / ADVICE, label)
    if not isinstance(content, dict) or set(content) != {"notes", "rows"}:
        raise UserError(f"{label}: must hold notes and rows")
    found = {}
    for name, row in content[part].items():
        try:
            found[str(name)] = Row.model_validate(row)
        except ValidationError as error:
            raise UserError(f"{label}: {name}: {first_problem(error, whole='row')}") from None
    return found


def _evidence_problems(project: Project, advice: Advice) -> Iterator[str]:
    boxes = _boxes(project)
    for label, needed in advice.conditions.theorems.items():
        name, _, item = label.partition(" ")
        if name not in boxes:
            yield f"book/{CONDITIONS}: {label}: no box of the book has this label"
        elif item and not re.search(rf"^{re.escape(item)}\. ", boxes[name], re.MULTILINE):
            yield f"book/{CONDITIONS}: {label}: the box has no such item"
        for name, node in needed.items():
            if not _is_test(project, node):
                yield f"book/{CONDITIONS}: {label}: {name}: no test {node}"
    for name, row in advice.rows.items():
        if row.measured and not (project.notebooks / f"{row.measured}.ipynb").is_file():
            yield f"book/{ADVICE}: {name}: no notebook {row.measured}"


def _row_problems(advice: Advice) -> Iterator[str]:
    needs, every = advice.conditions.theorems, advice.every()
    for name in sorted(set(advice.notes) & set(advice.rows)):
        yield f"book/{ADVICE}: {name}: is a note and a row; rename one"
    for name, row in every.items():
        label = f"book/{ADVICE}: {name}"
        for note in row.under:
            if note not in advice.notes:
                yield f"{label}: no note {note}"
        if name in advice.rows and not row.theorems and not row.measured:
            yield f"{label}: names neither a theorem nor the notebook that measured it"
        says = row.conditions().union(
            *(advice.notes[note].conditions() for note in row.under if note in advice.notes)
        )
        for condition in sorted(row.conditions() - set(advice.conditions.names)):
            yield f"{label}: no condition {condition!r} in book/{CONDITIONS}"
        for theorem in row.theorems:
            if theorem not in needs:
                yield f"{label}: {theorem} has no conditions in book/{CONDITIONS}"
            for condition in needs.get(theorem, ()):
                if condition not in says:
                    yield f"{label}: does not say {condition!r}, which {theorem} needs"
    resting = {theorem for row in every.values() for theorem in row.theorems}
    for theorem in needs:
        if theorem not in resting:
            yield f"book/{CONDITIONS}: {theorem}: no row of advice rests on it; delete it"
    for note in advice.notes:
        if not any(note in row.under for row in every.values()):
            yield f"book/{ADVICE}: {note}: no row stands under it"


def _page_problems(project: Project, advice: Advice) -> Iterator[str]:
    every = advice.every()
    anywhere: set[str] = set()
    for page, uses in uses_of_advice(project).items():
        shown = {row for row, _ in uses}
        anywhere |= shown
        for name, field in uses:
            if name not in every:
                yield f"{page}: no row {name} in book/{ADVICE}"
            elif field not in (has := every[name].fields()):
                yield f"{page}: row {name} has no {field}; it has {', '.join(has)}"
        for name in sorted(shown & set(every)):
            row = every[name]
            for text in TEXTS:
                if marked(getattr(row, text)) and (name, text) not in uses:
                    yield f"{page}: shows {name} without its {text!r}, which says conditions"
            for note in row.under:
                if note not in shown:
                    yield f"{page}: shows {name} without the note {note}, which says its conditions"
    for name in every:
        if name not in anywhere:
            yield f"book/{ADVICE}: {name}: no page shows it"


def uses_of_advice(project: Project) -> dict[str, list[tuple[str, str]]]:
    """The rows and fields that each page shows, in order, by the page's path."""
    found = {}
    for path, text in _sources(project):
        uses = [(match["row"], match["field"]) for match in SHOWN.finditer(text)]
        if uses:
            found[project.relative(path)] = uses
    return found


def _boxes(project: Project) -> dict[str, str]:
    """The text of every box that states something, by its label."""
    found = (box for _, text in _sources(project) for box in _BOX.finditer(text))
    return {box["label"]: box["text"] for box in found}


def _sources(project: Project) -> Iterator[tuple[Path, str]]:
    """The prose of the pages and notebooks that are written by hand."""
    for path in sorted(project.book.glob("*.md")):
        yield path, path.read_text(encoding="utf-8")
    for path in sorted(project.notebooks.glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        prose = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        yield path, "\n".join(prose)


def _is_test(project: Project, node: str) -> bool:
    file, _, name = node.partition("::")
    path = project.root / file
    return (
        file.startswith("tests/")
        and path.is_file()
        and re.search(rf"^def {re.escape(name)}\(", path.read_text("utf-8"), re.MULTILINE)
        is not None
    )
