"""The column of the KL term itself: which estimator it is, with which sign and coefficient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from kl_term.diagnosis.schema import Evidence, Floats, Measured, Rollouts, Settings, Shown
from kl_term.kl.names import CREDITS

#: Share of the column's squares that a multiple of the estimator explains. Float32 and seven digits
#: leave 1e-6 of them unexplained. A sign needs less; a name that explains as much as the middle
#: number may differ by rounding alone.
EXPLAINED, CONFUSED, IDENTIFIED = 0.9, 0.995, 0.999
#: Log-ratios whose root mean square is below this make all estimators but k1 equal to rounding.
SMALLEST_LOG_RATIO = 1e-3

INVERTED = "k3 of the inverted ratio"
ABSOLUTE = "the absolute log-ratio"
WEIGHTED = " times policy/old"


def measure_term(rollouts: Rollouts, settings: Settings) -> dict[str, float]:
    """How much of the column each candidate explains, ``term_is_*``, and its coefficient.

    The coefficient is fitted at every step, so that it may change while the run goes on.
    """
    term = settings.kl
    if rollouts.kl_term is None or (term is not None and not _sampled(settings)):
        return {}
    found = {"term_size": float(np.abs(rollouts.kl_term).mean())}
    log_ratio = rollouts.old_logp if settings.in_reward else rollouts.logp
    log_ratio = log_ratio - rollouts.ref_logp
    if np.sqrt(np.mean(log_ratio**2)) < SMALLEST_LOG_RATIO or len(log_ratio) < 100:
        return found
    step = np.zeros(len(log_ratio), np.int64) if rollouts.step is None else rollouts.step
    index = np.unique(step, return_inverse=True)[1].ravel()
    total = float(rollouts.kl_term @ rollouts.kl_term)
    for name, values in _candidates(rollouts, settings, log_ratio):
        inner = np.bincount(index, weights=values * rollouts.kl_term)
        square = np.bincount(index, weights=values**2)
        slope = np.divide(inner, square, out=np.zeros_like(inner), where=square > 0)
        rest = rollouts.kl_term - slope[index] * values
        share = 1 - float(rest @ rest) / total if total > 0 else 0.0
        if share > found.get(f"term_is_{name}", -np.inf):  # of the ways to credit it, the best
            found[f"term_is_{name}"] = share
            found[f"term_beta_{name}"] = float(np.median(slope))
    return found


def _sampled(settings: Settings) -> bool:
    term = settings.kl
    return term.estimator in ("k1", "k2", "k3") and term.level == "token" and term.ratio == "token"


#: Candidate -> its value at a log-ratio.
_VALUES: dict[str, Callable[[Floats], Floats]] = {
    "k1": np.array,
    "k2": lambda l: l**2 / 2,
    "k3": lambda l: np.expm1(-l) + l,
    INVERTED: lambda l: np.expm1(l) - l,
    ABSOLUTE: np.abs,
}


def _candidates(
    rollouts: Rollouts, settings: Settings, log_ratio: Floats
) -> Iterator[tuple[str, Floats]]:
    """Each in turn, so that few are held at a time; in the reward by each credit not ruled out."""
    ways: tuple[str, ...] = ("", WEIGHTED)
    if settings.in_reward:
        term = settings.kl
        ways = (term.credit,) if "credit" in term.model_fields_set else CREDITS
    for way, (name, make) in product(ways, _VALUES.items()):
        with np.errstate(over="ignore"):
            values = make(log_ratio)
            if settings.in_reward:
                values = _credited(values, rollouts, way)
            elif way:
                values = np.exp(np.minimum(rollouts.logp - rollouts.old_logp, 50.0)) * values
        yield name if settings.in_reward else name + way, np.nan_to_num(values, posinf=1e100)


def _credited(values: Floats, rollouts: Rollouts, credit: str) -> Floats:
    if credit == "immediate":
        return values
    whole = rollouts.sums(values)[rollouts.sequence]
    if credit == "whole":
        return whole
    before = np.cumsum(values) - values
    return whole - (before - before[rollouts.first][rollouts.sequence])


def _best(m: Measured) -> tuple[str, float, float] | None:
    """The candidate that explains most: its name, how much, and its coefficient."""
    shares = {k[8:]: v for k, v in m.numbers.items() if k.startswith("term_is_")}
    if not shares:
        return None
    best = max(shares, key=lambda name: shares[name])
    return best, shares[best], m.numbers[f"term_beta_{best}"]


def kl_left_out(m: Measured) -> Shown | None:
    named = m.settings.kl
    if m.numbers.get("term_size") != 0.0 or (named is not None and named.estimator == "none"):
        return None
    apart = np.abs(m.rollouts.logp - m.rollouts.ref_logp).max()
    if apart < SMALLEST_LOG_RATIO:
        return None
    return Shown({"largest |kl_term|": 0.0, "largest log-ratio": float(apart)})


def kl_negative(m: Measured) -> Shown | None:
    best = _best(m)
    if best is None or best[1] < EXPLAINED or best[2] >= 0:
        return None
    where = "taken from the reward" if m.settings.in_reward else "added to the loss"
    return Shown(
        {"estimator": best[0], "share explained": best[1], "coefficient": best[2]},
        words={"where": where},
    )


def other_term(m: Measured) -> Shown | None:
    """A named term that is another, or, of an unknown term, an estimator that is none of a KL."""
    best, named = _best(m), m.settings.kl
    if best is None or kl_negative(m) is not None or kl_left_out(m) is not None:
        return None
    evidence: Evidence = {"share that it explains": best[1], "coefficient": best[2]}
    found = best[0] if best[1] >= IDENTIFIED else "something else"
    if named is None:
        expected, right = "a KL estimator", not best[0].startswith((INVERTED, ABSOLUTE))
        right |= best[1] < IDENTIFIED
    else:
        expected = (named.value or named.estimator) + (
            "" if named.weighting == "none" else WEIGHTED
        )
        share = m.numbers[f"term_is_{expected}"]
        evidence["share that the named term explains"] = share
        right = share > CONFUSED
    return None if right else Shown(evidence, words={"found": found, "named": expected})
