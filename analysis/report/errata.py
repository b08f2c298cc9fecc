"""The errata, the sources' and our own: what stood, what is true, and a test of both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from analysis.errors import UserError
from analysis.report.ledger import SOURCES, Source, load_rows
from analysis.report.project import Project
from analysis.schema import Schema

_INTRODUCTION = """\
# Errata

Misprints, sign errors and self-contradictions of the five sources, in the order of
{doc}`/book/_generated/ledger`, and then [our own](our-own-corrections). Each has a test in which
the printed form fails and the corrected one passes. None is a reproach: finding them is how we
learned what the formulas say.
"""

_OUR_OWN = """\
(our-own-corrections)=
## Our own corrections

What earlier versions of this book stated and what is not so, or not as widely as it was stated.
The name below is that of the test that shows it; where there is none, the chapter does. The date
is that of the version in which the statement first stood.
"""


class Erratum(Schema):
    """One misprint."""

    id: str = Field(pattern=r"^E-S[0-4]-\d\d$")
    place: str  #: equation, section or figure
    printed: str
    corrected: str
    why: str  #: one sentence
    test: str  #: name of the test that shows it

    @property
    def source(self) -> str:
        """The letter of the source, as its number stands in the id."""
        return SOURCES[int(self.id[3])]


class Correction(Schema):
    """One statement of this book that was wrong."""

    id: str = Field(pattern=r"^[A-Z][A-Za-z0-9-]*$")
    where: str = Field(min_length=1)  #: every place that made the statement
    stood: str = Field(min_length=1)
    since: date = Field(strict=False)  #: of the first version that made it
    true: str = Field(min_length=1)
    test: str = Field(min_length=1, alias="shown_by")  #: name of the test that fails for what stood


Tested = TypeVar("Tested", Erratum, Correction)


def load_errata(project: Project) -> list[Erratum]:
    """Every erratum of the sources, in the order of the file.

    Raises:
        UserError: a malformed or repeated row, or a test that does not exist; names the row.
    """
    return _tested(project, load_rows(project, project.book / "errata.yaml", Erratum))


def load_corrections(project: Project) -> list[Correction]:
    """Every corrected statement of our own, in the order of the file; raises as `load_errata`."""
    return _tested(project, load_rows(project, project.book / "corrections.yaml", Correction))


def errata_page(
    errata: Sequence[Erratum], corrections: Sequence[Correction], sources: Sequence[Source]
) -> str:
    """The page as MyST text."""
    headings = {source.id: source.heading for source in sources}
    parts = [_INTRODUCTION]
    for letter, rows in groupby(sorted(errata, key=lambda e: e.id), key=lambda e: e.source):
        parts.append(f"## {headings[letter]}\n")
        for row in rows:
            said = {"Printed": row.printed, "Corrected": row.corrected}
            parts.append(_entry(row, row.place, said, row.why))
    parts.append(_OUR_OWN)
    for row in corrections:
        said = {f"Stood since {row.since}": row.stood}
        parts.append(_entry(row, row.where, said, f"*True:* {row.true}"))
    return "\n".join(parts)


def _entry(row: Erratum | Correction, place: str, said: dict[str, str], closing: str) -> str:
    lines = [f"({row.id.lower()})=", ":::{div} erratum", f"**{row.id}** {place}", ""]
    for name, text in said.items():
        lines += [f"*{name}:* {text}", ""]
    return "\n".join([*lines, closing, "", f"`{row.test}`" if row.test else "", ":::", ""])


def _tested(project: Project, rows: list[Tested]) -> list[Tested]:
    tests = _tests(project.root / "tests")
    for row in rows:
        if row.test and row.test.partition("[")[0] not in tests:
            raise UserError(f"{row.id}: no test {row.test}")
    return rows


def _tests(folder: Path) -> set[str]:
    return {
        name
        for path in folder.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
