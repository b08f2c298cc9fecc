"""The errata, the sources' and our own: what stood, what is true, and a test of both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from analysis.errors import UserError
from analysis.report.generated import render
from analysis.report.ledger import SOURCES, Source, load_rows
from analysis.report.project import Project
from analysis.schema import Schema


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
    """Every erratum of the sources, in the order of the file."""
    return _tested(project, load_rows(project, project.book / "errata.yaml", Erratum))


def load_corrections(project: Project) -> list[Correction]:
    """Every corrected statement of our own, in the order of the file; raises as `load_errata`."""
    return _tested(project, load_rows(project, project.book / "corrections.yaml", Correction))


def errata_page(
    errata: Sequence[Erratum], corrections: Sequence[Correction], sources: Sequence[Source]
) -> str:
    """The page as MyST text."""
    headings = {source.id: source.heading for source in sources}
    return render("errata.md", errata=errata, corrections=corrections, headings=headings)


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
