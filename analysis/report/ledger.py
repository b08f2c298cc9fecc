"""The ledger: every claim of the seed documents, its verdict, and the code that decides it.

``book/claims.yaml`` records what was found. :func:`recompute` finds it again, and
:func:`disagreement` says in one line where the two differ, so no verdict and no figure outlives
its evidence.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from analysis.errors import Refused, first_problem
from analysis.experiments.claims import Decision, Finding, Verdict, decisions
from analysis.report.numbers import fill
from analysis.report.project import Project
from analysis.report.strict_yaml import load_yaml

_ID = re.compile(r"S[0-4]-(\d+|x[a-z])")
_QUOTED = re.compile(r"\{([a-z][a-z0-9_]*)(?::[^{}]*)?\}")


class Claim(BaseModel):
    """One row of the ledger."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str = Field(pattern=_ID.pattern)
    seed: int = Field(ge=0, le=4)
    source: str  #: where in the seed
    kind: Literal["definition", "theorem", "numeric", "empirical", "method"]
    statement: str
    verdict: Verdict
    condition: str  #: one sentence: when it holds, or what is true instead
    measured: dict[str, float]  #: the figures the verdict rests on, by name
    figure: str  #: a phrase that quotes them, ``{name:.3g}``
    decided_by: str  #: dotted name of the function that recomputes verdict and figures
    test: str  #: tests/path.py::test_name
    section: str  #: page, or page#label, that proves or shows it
    implemented: str = ""  #: for definitions and methods: the function that implements it
    experiment: str = ""  #: for open claims: what will decide it
    tolerance: float = Field(default=1e-3, gt=0, lt=1)  #: relative, of the figures

    @model_validator(mode="after")
    def _complete(self) -> Claim:
        unknown = set(_QUOTED.findall(self.figure)) - set(self.measured)
        if unknown:
            raise ValueError(f"figure quotes {sorted(unknown)}, which measured does not hold")
        if (self.verdict == "open") != bool(self.experiment):
            raise ValueError("exactly the open claims name an experiment")
        if not self.id.startswith(f"S{self.seed}-"):
            raise ValueError(f"seed {self.seed} does not fit the id")
        return self

    @property
    def shown_figure(self) -> str:
        """The figure phrase with its numbers."""
        return fill(self.figure, self.measured)


@dataclass(frozen=True)
class Outcome:
    """What recomputing one claim gave, and where it departs from the ledger (empty: nowhere)."""

    claim: Claim
    finding: Finding | None
    problem: str
    seconds: float


def ledger_path(project: Project) -> Path:
    return project.book / "claims.yaml"


def load_ledger(project: Project) -> list[Claim]:
    """Every row, in the order of the file.

    Raises:
        Refused: no list of rows, an unknown or missing field, or an id written twice.
    """
    path = ledger_path(project)
    label = project.relative(path)
    rows = load_yaml(path, label)
    if not isinstance(rows, list):
        raise Refused(f"{label}: must be a list of claims")
    claims = [_row(label, number, row) for number, row in enumerate(rows, start=1)]
    ids = [claim.id for claim in claims]
    for twice in sorted({i for i in ids if ids.count(i) > 1}):
        raise Refused(f"{label}: {twice} is written twice; keep one")
    return claims


def select_claims(claims: Iterable[Claim], ids: Iterable[str]) -> list[Claim]:
    """The rows with these ids, all of them for none.

    Raises:
        Refused: an id that the ledger does not hold.
    """
    claims, wanted = list(claims), list(ids)
    known = {claim.id: claim for claim in claims}
    for identifier in wanted:
        if identifier not in known:
            raise Refused(f"no claim {identifier!r} in the ledger; ids look like {claims[0].id}")
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
        return None, f"no function decides it; register {claim.decided_by} with @decides"
    name = f"{function.__module__}.{function.__qualname__}"
    if name != claim.decided_by:
        return None, f"decided_by names {claim.decided_by}, but {name} decides it"
    try:
        finding = function()
    except Exception as error:  # a decision that crashes is a disagreement, not the end of the run
        return None, f"{name} raised {type(error).__name__}: {error}"
    return finding, disagreement(claim, finding)


def _row(label: str, number: int, row: object) -> Claim:
    identifier = row.get("id", f"row {number}") if isinstance(row, dict) else f"row {number}"
    try:
        return Claim.model_validate(row)
    except ValidationError as error:
        problem = first_problem(error, whole="row")
        raise Refused(f"{label}: {identifier}: {problem}") from None
