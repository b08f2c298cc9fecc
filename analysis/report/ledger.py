"""The ledger: every claim of the five sources, its verdict and its figures; and the errata.

``book/claims.yaml`` records what was found. :func:`recompute` finds it again with the functions
that ``@claim`` registers (:mod:`analysis.evidence.claims`), and :func:`disagreement` says in one
line where the two differ, so no verdict and no figure outlives its evidence.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal, TypeVar

import yaml
from pydantic import ConfigDict, Field, ValidationError, model_validator

from analysis.evidence.claims import Decision, Finding, Verdict, decisions
from analysis.report.project import Project
from analysis.report.strict_yaml import load_yaml
from kl_term.errors import UserError, first_problem
from kl_term.files import replace_file
from kl_term.numbers import fill
from kl_term.schema import Schema

SOURCES = "ABCDE"
Kind = Literal["definition", "theorem", "numeric", "empirical", "method"]
_QUOTED = re.compile(r"\{([a-z][a-z0-9_]*)(?::[^{}]*)?\}")


class Source(Schema):
    """One of the sources judged; a field that our copy does not give is empty."""

    id: str = Field(alias="key", pattern=f"^[{SOURCES}]$")
    about: str  #: one sentence
    title: str = ""
    title_in_english: str = ""
    opens: str = ""  #: its first words, where the title does not find it
    authors: str = ""
    date: str = ""
    link: str = ""
    cite: str = ""  #: key in the bibliography


class Claim(Schema):
    """One claim: what a source says, and what was found."""

    model_config = ConfigDict(allow_inf_nan=True)

    id: str = Field(pattern=r"^S[0-4]-(\d+|x[a-z])$")
    source: str = Field(pattern=f"^[{SOURCES}]$")
    place: str  #: where in the source
    kind: Kind
    statement: str
    verdict: Verdict
    condition: str  #: one sentence: when it holds, or what is true instead
    figure: str  #: a phrase that quotes what was measured, ``{name:.3g}``
    section: str  #: page, or page#label, that proves or shows it
    implemented: str = ""  #: for definitions and methods: the function that implements it
    experiment: str = ""  #: for open claims: what will decide it
    tolerance: float = Field(default=1e-3, gt=0, lt=1)  #: relative, of the figures
    measured: dict[str, float]  #: by name; written by ``analysis claims --write``

    @model_validator(mode="after")
    def _complete(self) -> Claim:
        unknown = set(_QUOTED.findall(self.figure)) - set(self.measured)
        if unknown:
            raise ValueError(f"figure quotes {sorted(unknown)}, which measured does not hold")
        if (self.verdict == "open") != bool(self.experiment):
            raise ValueError("exactly the open claims name an experiment")
        if self.source != SOURCES[int(self.id[1])]:
            raise ValueError(f"source {self.source} does not fit the id")
        return self

    @property
    def shown_figure(self) -> str:
        """The figure phrase with its numbers."""
        return fill(self.figure, self.measured)


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


@dataclass(frozen=True)
class Outcome:
    """What recomputing one claim gave, and where it departs from the ledger (empty: nowhere)."""

    claim: Claim
    finding: Finding | None
    problem: str
    seconds: float


Row = TypeVar("Row", bound=Schema)


def load_ledger(project: Project) -> list[Claim]:
    """Every claim, in the order of the file; raises as :func:`load_rows`."""
    return load_rows(project, project.claims, Claim)


def load_sources(project: Project) -> list[Source]:
    """The sources judged, in their order; raises as :func:`load_rows`."""
    return load_rows(project, project.book / "sources.yaml", Source)


def load_errata(project: Project) -> list[Erratum]:
    """Every erratum of the sources, in the order of the file; raises as :func:`load_rows`."""
    return load_rows(project, project.book / "errata.yaml", Erratum)


def load_corrections(project: Project) -> list[Correction]:
    """Every correction of our own, in the order of the file; raises as :func:`load_rows`."""
    return load_rows(project, project.book / "corrections.yaml", Correction)


def load_rows(project: Project, path: Path, kind: type[Row]) -> list[Row]:
    """Every entry of a file of the ledger; a test that an entry names has to exist."""
    label = project.relative(path)
    rows = load_yaml(path, label) or []
    if not isinstance(rows, list):
        raise UserError(f"{label}: must be a list")
    parsed = [_row(label, number, row, kind) for number, row in enumerate(rows, start=1)]
    ids = [row.id for row in parsed]
    for twice in sorted({i for i in ids if ids.count(i) > 1}):
        raise UserError(f"{label}: {twice} is written twice; keep one")
    known = _tests(project.root / "tests") if "test" in kind.model_fields else set()
    for row in parsed:
        test = getattr(row, "test", "").partition("[")[0]
        if test and test not in known:
            raise UserError(f"{label}: {row.id}: no test {test}")
    return parsed


def write_measured(project: Project, outcomes: Iterable[Outcome]) -> list[str]:
    """Write recomputed verdicts and figures into the ledger's rows that disagree; all others stay
    as they are, to the byte.

    Returns:
        The claims whose rows were written.

    Raises:
        UserError: a claim has no finding: it raised, or no function decides it. Nothing is written.
    """
    outcomes = list(outcomes)
    if undecided := [f"{o.claim.id}: {o.problem}" for o in outcomes if o.finding is None]:
        raise UserError("\n".join([*undecided, "nothing was written"]))
    found = {o.claim.id: o.finding for o in outcomes if o.finding is not None and o.problem}
    path = project.claims
    rows = load_yaml(path, project.relative(path))
    head, *texts = re.split(r"^(?=- )", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for place, (row, _) in enumerate(zip(rows, texts, strict=True)):
        if finding := found.get(row["id"]):
            row["verdict"] = finding.verdict
            row["measured"] = {k: float(f"{float(v):.4g}") for k, v in finding.figures.items()}
            written = {"sort_keys": False, "allow_unicode": True, "width": 110}
            texts[place] = yaml.safe_dump([row], **written)
    replace_file(path, "".join([head, *texts]).encode())
    return list(found)


def select_claims(claims: Iterable[Claim], ids: Iterable[str]) -> list[Claim]:
    """The rows with these ids, all of them for none."""
    claims, wanted = list(claims), list(ids)
    known = {claim.id: claim for claim in claims}
    for identifier in wanted:
        if identifier not in known:
            raise UserError(f"no claim {identifier!r} in the ledger; ids look like {claims[0].id}")
    return [known[identifier] for identifier in wanted] if wanted else claims


def recompute(
    claims: Iterable[Claim], known: Callable[[], dict[str, Decision]] = decisions
) -> Iterator[Outcome]:
    """Run the function that decides each claim and compare."""
    functions = known()
    for claim in claims:
        started = time.monotonic()
        finding, problem = _decide(claim, functions)
        yield Outcome(claim, finding, problem, time.monotonic() - started)


def disagreement(claim: Claim, finding: Finding) -> str:
    """How a finding departs from the ledger's row, in one line; empty if it does not."""
    if finding.verdict != claim.verdict:
        return f"recorded {claim.verdict!r}, recomputed {finding.verdict!r}"
    if set(finding.figures) != set(claim.measured):
        return (
            f"measured names {sorted(claim.measured)}, recomputed names {sorted(finding.figures)}"
        )
    for name, recorded in claim.measured.items():
        value = float(finding.figures[name])
        if not (
            math.isclose(value, recorded, rel_tol=claim.tolerance, abs_tol=1e-9)
            or (math.isnan(value) and math.isnan(recorded))
        ):
            return f"{name} recorded {recorded:.6g}, recomputed {value:.6g}"
    return ""


def _decide(claim: Claim, functions: dict[str, Decision]) -> tuple[Finding | None, str]:
    function = functions.get(claim.id)
    if function is None:
        return None, f'no function decides it; write one under @claim("{claim.id}")'
    try:
        finding = function()
    except Exception as error:  # a decision that crashes is a disagreement, not the end of the run
        name = f"{function.__module__}.{function.__qualname__}"
        return None, f"{name} raised {type(error).__name__}: {error}"
    return finding, disagreement(claim, finding)


def _row(label: str, number: int, row: object, kind: type[Row]) -> Row:
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        named = isinstance(row, dict) and (row.get("id") or row.get("key"))
        problem = first_problem(error, whole="row")
        raise UserError(f"{label}: {named or f'row {number}'}: {problem}") from None


def _tests(folder: Path) -> set[str]:
    return {
        name
        for path in folder.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
