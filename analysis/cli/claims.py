"""``analysis claims``: recompute the ledger and refuse any disagreement."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from analysis.freshness import track_reads
from analysis.report.project import find_project
from analysis.report.provenance import ledger_problems, store_ledger
from kl_term.errors import UserError


def claims(
    ids: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    force: bool = False,
    write: bool = False,
) -> None:
    """Recompute the verdict and the figures of every claim that needs no training.

    Prints one line a claim and ends with a non-zero status if any departs from book/claims.yaml.

    Args:
        ids: claims to recompute, such as S4-12; all of them by default.
        force: recompute although nothing changed since the last time.
        write: write what was recomputed into the rows of book/claims.yaml that disagree: verdicts
            and measured figures. Refused, with nothing written, where a claim could not be decided.
    """
    project = find_project(Path.cwd())
    if not (ids or force or write or ledger_problems(project)):
        print("ledger  up to date: all claims agree", file=sys.stderr)
        return
    from analysis.report.ledger import load_ledger, recompute, select_claims, write_measured

    chosen = select_claims(load_ledger(project), ids)
    with track_reads(project.root) as reads:
        bar = tqdm(
            recompute(chosen),
            total=len(chosen),
            unit="claim",
            leave=False,
            disable=not sys.stderr.isatty(),
        )
        outcomes = list(bar)
    for outcome in outcomes:
        claim = outcome.claim
        print(f"{claim.id:<6} {claim.verdict:<9} {outcome.problem or claim.shown_figure}")
    if write:
        written = write_measured(project, outcomes)
        what = ", ".join(written) or "nothing, all rows agree"
        print(f"written to book/claims.yaml: {what}", file=sys.stderr)
        return
    if not ids:
        store_ledger(project, {o.claim.id: o.problem for o in outcomes if o.problem}, reads.paths)
    departures = [f"{o.claim.id}: {o.problem}" for o in outcomes if o.problem]
    if departures:
        raise UserError("\n".join([*departures, f"{len(departures)} of {len(outcomes)} disagree"]))
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"{len(outcomes)} claims agree with book/claims.yaml ({seconds:.0f} s)", file=sys.stderr)
