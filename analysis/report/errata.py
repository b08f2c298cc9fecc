"""The errata of the seed documents: what is printed, what it should say, and a test of both."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from analysis.errors import Refused, first_problem
from analysis.files import replace_file
from analysis.report.evidence import missing_test, tested_link
from analysis.report.project import Project
from analysis.report.strict_yaml import load_yaml

_INTRODUCTION = """\
# Errata of the seed documents

Misprints, sign errors and self-contradictions of the five documents, in the order of the
documents. Each has a test in which the printed form fails and the corrected one passes. None is
a reproach: finding them is how we learned what the formulas say.
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


def load_errata(project: Project) -> list[Erratum]:
    """Every erratum, in the order of the file.

    Raises:
        Refused: a malformed or repeated row, or a test that does not exist; names the row.
    """
    path = project.book / "errata.yaml"
    label = project.relative(path)
    rows = load_yaml(path, label)
    errata = [_row(label, row) for row in rows]
    ids = [erratum.id for erratum in errata]
    for twice in sorted({i for i in ids if ids.count(i) > 1}):
        raise Refused(f"{label}: {twice} is written twice; keep one")
    for erratum in errata:
        if problem := missing_test(project, erratum.test):
            raise Refused(f"{label}: {erratum.id}: {problem}")
    return errata


def write_errata(project: Project, path: Path) -> None:
    """Write the page of errata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, errata_page(project, load_errata(project)).encode())


def errata_page(project: Project, errata: list[Erratum]) -> str:
    """The page as MyST text."""
    parts = [_INTRODUCTION]
    for seed, rows in groupby(sorted(errata, key=lambda e: e.id), key=lambda e: e.seed):
        parts.append(f"## Seed {seed}: {SEEDS[seed]}\n")
        parts += [_entry(project, erratum) for erratum in rows]
    return "\n".join(parts)


def _entry(project: Project, erratum: Erratum) -> str:
    return "\n".join(
        [
            f"({erratum.id.lower()})=",
            ":::{div} erratum",
            f"**{erratum.place}**",
            "",
            f"*Printed:* {erratum.printed}",
            "",
            f"*Corrected:* {erratum.corrected}",
            "",
            f"{erratum.why} ({tested_link(project, erratum.test, 'test')})",
            ":::",
            "",
        ]
    )


def _row(label: str, row: object) -> Erratum:
    try:
        return Erratum.model_validate(row)
    except ValidationError as error:
        name = row.get("id", "a row") if isinstance(row, dict) else "a row"
        raise Refused(f"{label}: {name}: {first_problem(error, whole='row')}") from None
