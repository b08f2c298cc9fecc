"""The errata, the seed documents' and our own: what stood, what is true, and a test of both."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from analysis.errors import Refused, first_problem
from analysis.files import replace_file
from analysis.report.evidence import missing_test, tested_link
from analysis.report.project import Project
from analysis.report.strict_yaml import load_yaml

_INTRODUCTION = """\
# Errata

Misprints, sign errors and self-contradictions of the five seed documents, in the order of the
documents, and then [our own](our-own-corrections). Each has a test in which the printed form fails
and the corrected one passes. None is a reproach: finding them is how we learned what the formulas
say.
"""

_OUR_OWN = """\
(our-own-corrections)=
## Our own corrections

What earlier versions of this book stated and what is not so, or not as widely as it was stated.
The date is that of the version in which the statement first stood.
"""

SEEDS = {
    0: "a blog post on the KL estimator of DeepSeekMath",
    1: "a tutorial on GRPO, PPO and DPO",
    2: "a blog post on TRL's KL term",
    3: "lecture notes on aligning language models",
    4: "Rethinking KL Divergence in RLHF, first version of March 2025",
}


class Erratum(BaseModel):
    """One misprint."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str = Field(pattern=r"^E-S[0-4]-\d\d$")
    seed: int = Field(ge=0, le=4)
    place: str  #: equation, section or figure
    printed: str
    corrected: str
    why: str  #: one sentence
    test: str  #: tests/path.py::test_name


class Correction(BaseModel):
    """One statement of this book that was wrong."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str = Field(pattern=r"^[A-Z][A-Za-z0-9-]*$")
    where: str = Field(min_length=1)  #: every place that made the statement
    stood: str = Field(min_length=1)
    since: date = Field(strict=False)  #: of the first version that made it
    true: str = Field(min_length=1)
    test: str = Field(alias="shown_by")  #: tests/path.py::test_name


Row = TypeVar("Row", Erratum, Correction)


def load_errata(project: Project) -> list[Erratum]:
    """Every erratum of the seed documents, in the order of the file.

    Raises:
        Refused: a malformed or repeated row, or a test that does not exist; names the row.
    """
    return _load(project, "errata.yaml", Erratum)


def load_corrections(project: Project) -> list[Correction]:
    """Every corrected statement of our own, in the order of the file; raises as `load_errata`."""
    return _load(project, "corrections.yaml", Correction)


def write_errata(project: Project, path: Path) -> None:
    """Write the page of errata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    page = errata_page(project, load_errata(project), load_corrections(project))
    replace_file(path, page.encode())


def errata_page(
    project: Project, errata: Sequence[Erratum], corrections: Sequence[Correction]
) -> str:
    """The page as MyST text."""
    parts = [_INTRODUCTION]
    for seed, rows in groupby(sorted(errata, key=lambda e: e.id), key=lambda e: e.seed):
        parts.append(f"## Seed {seed}: {SEEDS[seed]}\n")
        for row in rows:
            said = {"Printed": row.printed, "Corrected": row.corrected}
            parts.append(_entry(project, row, row.place, said, row.why))
    parts.append(_OUR_OWN)
    for row in corrections:
        said = {f"Stood since {row.since}": row.stood}
        parts.append(_entry(project, row, row.where, said, f"*True:* {row.true}"))
    return "\n".join(parts)


def _entry(
    project: Project, row: Erratum | Correction, place: str, said: dict[str, str], closing: str
) -> str:
    lines = [f"({row.id.lower()})=", ":::{div} erratum", f"**{place}**", ""]
    for name, text in said.items():
        lines += [f"*{name}:* {text}", ""]
    link = tested_link(project, row.test, "test")
    return "\n".join([*lines, f"{closing} ({link})", ":::", ""])


def _load(project: Project, name: str, kind: type[Row]) -> list[Row]:
    path = project.book / name
    label = project.relative(path)
    rows = load_yaml(path, label) or []
    if not isinstance(rows, list):
        raise Refused(f"{label}: must be a list")
    parsed = [_row(label, row, kind) for row in rows]
    ids = [row.id for row in parsed]
    for twice in sorted({i for i in ids if ids.count(i) > 1}):
        raise Refused(f"{label}: {twice} is written twice; keep one")
    for row in parsed:
        if problem := missing_test(project, row.test):
            raise Refused(f"{label}: {row.id}: {problem}")
    return parsed


def _row(label: str, row: object, kind: type[Row]) -> Row:
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        name = row.get("id", "a row") if isinstance(row, dict) else "a row"
        raise Refused(f"{label}: {name}: {first_problem(error, whole='row')}") from None
