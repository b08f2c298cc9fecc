"""The ledger and the errata as pages: one card an entry, its evidence linked.

Cards are MyST, so every link is checked when the book is built and the page reads without
scripts; ``book/_static/ledger.js`` only adds the filters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from analysis.evidence.claims import VERDICTS, decisions
from analysis.report.generated import render, texts_of
from analysis.report.ledger import Correction, Erratum, Kind, Source, load_ledger, load_sources
from analysis.report.project import Project
from kl_term.errors import UserError


def ledger_page(project: Project, translate: Callable[[str], str] = str) -> str:
    """The ledger as MyST text, in the words that ``translate`` gives."""
    claims, functions = load_ledger(project), decisions()
    if missing := [claim.id for claim in claims if claim.id not in functions]:
        raise UserError(f"book/claims.yaml: no function decides {', '.join(missing)}")
    return render(
        "ledger.md",
        _=translate,
        claims=claims,
        sources=load_sources(project),
        functions={i: f"{one.__module__}.{one.__qualname__}" for i, one in functions.items()},
        verdicts=VERDICTS,
        counts=Counter(claim.verdict for claim in claims),
    )


def translatable(project: Project) -> Iterator[str]:
    """The texts of the ledger's page that are translated, in English: not the conditions."""
    yield from (*texts_of("ledger.md"), *texts_of("source.md"), *get_args(Kind), *VERDICTS)
    yield from (source.about for source in load_sources(project))
    yield from (claim.statement for claim in load_ledger(project))


def errata_page(
    errata: Sequence[Erratum], corrections: Sequence[Correction], sources: Sequence[Source]
) -> str:
    """The errata of the sources and our own corrections as MyST text."""
    by_id = {source.id: source for source in sources}
    return render("errata.md", _=str, errata=errata, corrections=corrections, sources=by_id)
