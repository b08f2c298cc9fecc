"""What is found wrong with a loss: one line each, what to change, and the theorem behind it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
#: Where the theorems stand.
BOOK = "https://kl-term.github.io/kl-term/"

#: Property of a right loss -> the codes above a note under which it does not hold: all there are.
PROPERTIES: dict[str, tuple[str, ...]] = {
    "the KL has a gradient": ("no-gradient", "beta-does-nothing", "kl-not-paid"),
    "the KL reads the reference": ("reference-not-read",),
    "the KL has the right sign": ("sign", "kl-times-advantage"),
    "the KL descends a divergence": (
        "minimises-nothing", "no-known-divergence", "not-zero-at-reference", "another-divergence",
        "estimator-in-reward", "unequal-supports",
    ),
    "policy, reference and sampler are in their places": (
        "exchanged", "kl-ratio-to-reference", "shifted-reference",
        "pointwise-kl-div", "absolute", "positive-part", "score-term", "ratio-of-another-level",
        "wrong-axis",
    ),
    "the coefficient is the one asked for": (
        "scale", "counted-twice", "beta-not-linear", "inside-the-std",
    ),
    "a token pays for what follows": ("credit", "tokens-left-out"),
    "padding is not read": ("reads-padding", "padding-width"),
    "answers do not read each other": ("row-order", "reads-other-answers", "policy-axis"),
    "the divisor is an aggregation": ("divisor", "sum-over-batch", "aggregations-differ"),
    "the gradient does not die": ("dead-zone", "pushes-away", "filter", "digits"),
    "the policy part ascends the advantage": (
        "policy-no-gradient", "policy-sign", "policy-ratio", "policy-clip", "policy-switched",
        "policy-weight", "reward-not-paid",
    ),
    "arguments are left as they were": ("modifies-arguments",),
}  # fmt: skip


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
