"""``analysis check``: in seconds, whether what is stored belongs together."""

from __future__ import annotations

from pathlib import Path

from analysis.report.checking import check_project
from analysis.report.project import find_project
from kl_term.errors import UserError


def check() -> None:
    """Check results, manifests, runs, stored outputs and claims against each other.

    Nothing is run and nothing recomputed: prints a line for each kind that says what it covers, and
    ends with a non-zero status if anything departs. What is not here is said, and no departure.
    """
    problems = []
    for checked in check_project(find_project(Path.cwd())):
        found = len(checked.problems)
        state = "absent" if checked.absent else f"{found} wrong" if found else "ok"
        print(f"{checked.kind:<8} {state:<8} {checked.covers}")
        problems += checked.problems
    print("not checked: numbers that were wrong when they were recorded (analysis reproduce)")
    if problems:
        raise UserError("\n".join(problems))
