"""The ledger as a page: one card a claim, its evidence linked, filtered by seed, kind and verdict.

Cards are MyST, so every link is checked when the book is built and the page reads without
scripts; ``book/_static/ledger.js`` only adds the three filters.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from analysis.errors import Refused
from analysis.experiments.claims import VERDICTS
from analysis.files import replace_file
from analysis.report.equations import equations
from analysis.report.evidence import (
    code_link,
    missing_function,
    missing_section,
    missing_test,
    section_link,
    tested_link,
)
from analysis.report.ledger import Claim, load_ledger
from analysis.report.project import Project

_INTRODUCTION = """\
# The ledger: every claim, decided

Five documents that taught many of us GRPO make {total} checkable statements: definitions, theorems,
numbers, experiences, methods. Each has a verdict here, the exact condition, the figure it rests on,
and the code that recomputes it. `analysis claims` recomputes them all and fails on any
disagreement; so does the build of this page.

**holds**: true as worded. **holds if**: true in part, or under a condition the source does not
state. **fails**: false as worded. **open**: needs training at a scale this book has not recorded.

```{{div}} ledger-filters
Filter by seed, kind and verdict with the buttons above the first claim (they need JavaScript).
```

{summary}
"""


def write_ledger(project: Project, path: Path) -> None:
    """Write the ledger's page.

    Raises:
        Refused: a row is malformed, or names a function, test or section that does not exist.
    """
    claims = load_ledger(project)
    faults = evidence_problems(project, claims)
    if faults:
        raise Refused("\n".join(faults))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, ledger_page(project, claims).encode())


def ledger_page(project: Project, claims: list[Claim]) -> str:
    """The page as MyST text."""
    labelled = {equation.label for equation in equations(project.root)}
    count = Counter(claim.verdict for claim in claims)
    summary = ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict])
    introduction = _INTRODUCTION.format(total=len(claims), summary=f"In all: {summary}.")
    return "\n".join([introduction, *(_card(project, claim, labelled) for claim in claims)])


def evidence_problems(project: Project, claims: list[Claim]) -> list[str]:
    """One line for each row whose function, test or section is not in the checkout."""
    return [
        f"book/claims.yaml: {claim.id}: {problem}"
        for claim in claims
        for problem in _missing_evidence(project, claim)
    ]


def _missing_evidence(project: Project, claim: Claim) -> list[str]:
    named = {"decided_by": claim.decided_by, "implemented": claim.implemented}
    problems = [
        *(missing_function(project, field, name) for field, name in named.items() if name),
        missing_test(project, claim.test),
        missing_section(project, claim.section),
    ]
    return [problem for problem in problems if problem]


def _card(project: Project, claim: Claim, labelled: set[str]) -> str:
    verdict = claim.verdict.replace(" ", "-")
    lines = [
        f"({claim.id.lower()})=",
        f":::{{div}} claim claim-seed-{claim.seed} claim-{claim.kind} claim-{verdict}",
        f"**{claim.id}** {claim.statement}",
        "",
        f"<span class='verdict verdict-{verdict}'>{claim.verdict}</span> {claim.condition}",
        "",
        f"*Measured:* {claim.shown_figure}." if claim.shown_figure else "",
        f"*Will be decided by:* {claim.experiment}" if claim.experiment else "",
        "",
        " · ".join(_evidence(project, claim, labelled)),
        ":::",
        "",
    ]
    return "\n".join(lines)


def _evidence(project: Project, claim: Claim, labelled: set[str]) -> list[str]:
    named = claim.source.startswith("seed")
    links = [claim.source if named else f"seed {claim.seed}, {claim.source}", claim.kind]
    if claim.implemented:
        links.append(f"implemented in {code_link(project, claim.implemented)}")
    links.append(f"recomputed by {code_link(project, claim.decided_by)}")
    links.append(tested_link(project, claim.test, "tested"))
    links.append(section_link(claim.section, labelled))
    return links
