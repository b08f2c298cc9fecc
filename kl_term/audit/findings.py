"""What is found wrong with a loss: one line each, what to change, and the theorem behind it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
#: Where the theorems stand.
BOOK = "https://kl-term.github.io/kl-term/"


class Finding(NamedTuple):
    """One thing that is so, and what to do about it."""

    code: str
    severity: Severity
    says: str
    advice: str
    theorem: str | None = None  #: the label of a theorem of the book


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The worst first, in the order found; each code once."""
    kept: dict[str, Finding] = {}
    for finding in sorted(findings, key=lambda f: SEVERITIES.index(f.severity)):
        kept.setdefault(finding.code, finding)
    return tuple(kept.values())
