"""``analysis claims``: recompute the ledger and refuse any disagreement."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from analysis.errors import Refused
from analysis.report.ledger import load_ledger, recompute, select_claims
from analysis.report.project import find_project
from analysis.report.settled import settled_ledger, store_outcomes


def claims(ids: Annotated[tuple[str, ...], tyro.conf.Positional] = (), force: bool = False) -> None:
    """Recompute the verdict and the figures of every claim that needs no training.

    Prints one line a claim and ends with a non-zero status if any departs from book/claims.yaml.

    Args:
        ids: claims to recompute, such as S4-12; all of them by default.
        force: recompute although nothing changed since the last time.
    """
    project = find_project(Path.cwd())
    ledger = load_ledger(project)
    if not ids and not force and settled_ledger(project):
        print(f"ledger  up to date: {len(ledger)} claims agree", file=sys.stderr)
        return
    chosen = select_claims(ledger, ids)
    outcomes = list(
        tqdm(
            recompute(chosen),
            total=len(chosen),
            unit="claim",
            leave=False,
            disable=not sys.stderr.isatty(),
        )
    )
    for outcome in outcomes:
        claim = outcome.claim
        print(f"{claim.id:<6} {claim.verdict:<9} {outcome.problem or claim.shown_figure}")
    if not ids:
        store_outcomes(project, outcomes)
    departures = [f"{o.claim.id}: {o.problem}" for o in outcomes if o.problem]
    if departures:
        raise Refused("\n".join([*departures, f"{len(departures)} of {len(outcomes)} disagree"]))
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"{len(outcomes)} claims agree with book/claims.yaml ({seconds:.0f} s)", file=sys.stderr)
