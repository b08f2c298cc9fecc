"""The tables of ``book/kl_curve.md``: what a trainer's KL curve averages, and what that reads."""

from __future__ import annotations

import math
from typing import NamedTuple

from analysis.chapters.ch01_estimators import logged_table
from analysis.chapters.ch14_frameworks.logs import AVERAGES, LOGS
from analysis.report.generated import render


class Reading(NamedTuple):
    """What two averages show of a policy whose answers are longer or shorter than the reference's.

    KLs in nats, on fresh samples, over endless batches.
    """

    length: float  #: mean tokens of an answer of the policy
    ref_length: float
    per_token: float  #: the KL
    tokens: dict[str, float]  #: by estimator
    completions: dict[str, float]


def readings() -> list[Reading]:
    """Enumerated: answers that end with one probability at each token, 600 at most."""
    found = []
    for end, ref_end in ((0.01, 0.02), (0.02, 0.01), (0.0182, 0.02)):
        table = logged_table(end, ref_end, 600).set_index("average")
        row = {name: table.loc[name, ["k1", "k3"]].to_dict() for name in table.index}
        per_token = table.per_token["tokens"]
        found.append(Reading(1 / end, 1 / ref_end, per_token, row["tokens"], row["completions"]))
    return found


def halving(answers: int, horizon: int) -> int:
    """Updates in which Ziegler's controller halves beta while it reads a KL below its band.

    .. math:: \\beta \\leftarrow \\beta\\, \\Big( 1 - 0.2\\, \\frac{n}{h} \\Big)
    """
    return math.ceil(math.log(0.5) / math.log1p(-0.2 * answers / horizon))


def kl_curve_page() -> str:
    """The generated part of the page."""
    return render(
        "kl_curve.md",
        logs=LOGS,
        averages=AVERAGES,
        readings=readings(),
        answers=1024,
        horizon=10_000,
        halving=halving(1024, 10_000),
    )
