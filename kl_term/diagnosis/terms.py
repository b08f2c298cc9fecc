"""The column of the KL term itself: which estimator it is, with which sign and coefficient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from kl_term.diagnosis.schema import Evidence, Floats, Measured, Rollouts, Settings, Shown
from kl_term.diagnosis.statistics import medians
from kl_term.kl.names import CREDITS

#: Share of the column's squares that a multiple of the estimator explains. Float32 and seven digits
#: leave 1e-6 of them unexplained. A sign needs less; a name that explains as much as the middle
#: number may differ by rounding alone.
EXPLAINED, CONFUSED, IDENTIFIED = 0.9, 0.995, 0.999
#: Log-ratios whose root mean square is below this make all estimators but k1 equal to rounding.
SMALLEST_LOG_RATIO = 1e-3

#: A term below this is rounding: seven digits of a dump, or float32's cancellation in k3.
SMALLEST_DUE = 1e-5
#: A token's term is another than the step's coefficient says if it is off by half, and is absent
#: below a tenth; low precision is off by a few hundredths.
OFF, ABSENT = 0.5, 0.1
#: Share of the tokens with a term to speak of that may be without it: rounding makes none. Squares
#: do not see them: one token of a heavy tail may hold all squares but a thousandth.
MOST_ABSENT, FEWEST_ABSENT = 0.02, 20
#: A step with fewer tokens to speak of says nothing of its coefficient.
FEWEST_DUE = 20
#: Times by which the coefficient and the KL must move, in opposite directions, to be worth a word.
COEFFICIENT_MOVED, KL_MOVED = 2.0, 1.5
#: Times by which a coefficient jumps from a step to the next, and as many jumps up and down as no
#: schedule has: one rises once and falls once, a controller moves by a few hundredths.
JUMP, FEWEST_JUMPS, MOST_JUMPS = 1.5, 3, 0.1

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
        rest = slope[index]
        rest *= values
        np.subtract(rollouts.kl_term, rest, out=rest)
        share = 1 - float(rest @ rest) / total if total > 0 else 0.0
        if share > found.get(f"term_is_{name}", -np.inf):  # of the ways to credit it, the best
            found[f"term_is_{name}"] = share
            found[f"term_beta_{name}"] = float(np.median(slope))
        del values, rest  # or they are held while the next are made
    named = _expected(settings)
    shares = {key[8:]: share for key, share in found.items() if key.startswith("term_is_")}
    if not shares:
        return found
    best = max(shares, key=lambda name: shares[name])
    chosen = best if named is None else named
    return found | _by_token(rollouts, settings, log_ratio, chosen, index)


def _expected(settings: Settings) -> str | None:
    """The candidate that the named term is."""
    named = settings.kl
    if named is None:
        return None
    weighted = "" if named.weighting == "none" else WEIGHTED
    return (named.value or named.estimator) + weighted


def _by_token(
    rollouts: Rollouts, settings: Settings, log_ratio: Floats, name: str, step: np.ndarray
) -> dict[str, float]:
    """Tokens at which the term is not what its step's usual coefficient says, and where they are.

    Returns:
        ``term_absent_share`` and, of others that are off, ``term_off_share`` of the tokens with a
        term to speak of;
        ``term_absent_*``: the same share where it is largest among halves of the run, of the
        completion, and the advantage's signs; ``term_silent_steps``: share of the steps without
        any term; ``term_late_over_early``: the coefficient's last third over its first;
        ``term_jumps``: how often it leaps up and down again, and ``term_jumps_share`` of the steps.
    """
    values = max(
        (v for _, v in _candidates(rollouts, settings, log_ratio, only=name)),
        key=lambda v: abs(float(v @ rollouts.kl_term)) / max(1e-300, float(np.sqrt(v @ v))),
    )
    term = rollouts.kl_term
    loud = np.abs(term) > SMALLEST_DUE
    ratio = np.divide(term, values, out=np.zeros_like(term), where=loud & (values != 0))
    slopes = medians(ratio[loud], step[loud], int(step.max()) + 1)
    known = slopes[~np.isnan(slopes)]
    if not len(known):
        return {}
    usual = np.where(np.isnan(slopes), np.median(known), slopes)[step]
    due = np.abs(usual * values) > SMALLEST_DUE / ABSENT
    count = int(due.sum())
    if count < FEWEST_DUE:
        return {}
    off = due & (np.abs(term - usual * values) > OFF * np.abs(usual * values))
    absent = due & (np.abs(term) < ABSENT * np.abs(usual * values))
    found = {
        "term_absent_share": float(absent.sum() / count),
        "term_absent_tokens": float(absent.sum()),
        "term_off_share": float((off & ~absent).sum() / count),
    }
    if absent.any():
        found |= _places(rollouts, due, absent)
    owed, given = (
        np.bincount(step[which], minlength=len(slopes)) for which in (due, due & ~absent)
    )
    told = owed >= FEWEST_DUE
    if told.any():
        found["term_silent_steps"] = float((given[told] == 0).mean())
    told &= ~np.isnan(slopes)
    jumps = np.diff(np.log(np.abs(slopes[told])))
    turns = min((jumps > np.log(JUMP)).sum(), (jumps < -np.log(JUMP)).sum())
    found |= {"term_jumps": float(turns), "term_jumps_share": float(turns / max(1, told.sum()))}
    third = told.sum() // 3
    if third >= 2:
        early, late = np.median(slopes[told][:third]), np.median(slopes[told][-third:])
        if early > 0 and late > 0:
            found["term_late_over_early"] = float(late / early)
    return found


def _places(rollouts: Rollouts, due: np.ndarray, absent: np.ndarray) -> dict[str, float]:
    """Share of tokens without a term, in the part of a dump where it is largest."""
    place = rollouts.position - rollouts.position[rollouts.first][rollouts.sequence]
    parts = {
        "first_half_of_completions": 2 * place < rollouts.lengths[rollouts.sequence],
        "second_half_of_completions": 2 * place >= rollouts.lengths[rollouts.sequence],
        "where_the_ratio_is_above_one": rollouts.logp > rollouts.ref_logp,
        "where_the_ratio_is_below_one": rollouts.logp < rollouts.ref_logp,
    }
    if rollouts.advantage is not None:
        parts["positive_advantages"] = rollouts.advantage > 0
        parts["negative_advantages"] = rollouts.advantage < 0
    if rollouts.step is not None:
        middle = (rollouts.step.min() + rollouts.step.max()) / 2
        parts["first_half_of_the_run"] = rollouts.step <= middle
        parts["second_half_of_the_run"] = rollouts.step > middle
    shares = {
        name: float((absent & part).sum() / (due & part).sum())
        for name, part in parts.items()
        if (due & part).sum() >= FEWEST_DUE
    }
    if not shares:
        return {}
    most = max(shares, key=lambda name: shares[name])
    return {f"term_absent_{most}": shares[most]}


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
    rollouts: Rollouts, settings: Settings, log_ratio: Floats, only: str | None = None
) -> Iterator[tuple[str, Floats]]:
    """Each in turn, so that few are held at a time; in the reward by each credit not ruled out.

    ``only``: those of this name.
    """
    ways: tuple[str, ...] = ("", WEIGHTED)
    if settings.in_reward:
        term = settings.kl
        ways = (term.credit,) if "credit" in term.model_fields_set else CREDITS
    weight = None  # made once, and not before it is needed
    for way, (value, make) in product(ways, _VALUES.items()):
        name = value if settings.in_reward else value + way
        if only not in (None, name):
            continue
        with np.errstate(over="ignore"):
            values = make(log_ratio)
            if settings.in_reward:
                values = _credited(values, rollouts, way)
            elif way:
                if weight is None:
                    weight = np.exp(np.minimum(rollouts.logp - rollouts.old_logp, 50.0))
                values *= weight
        yield name, values if np.isfinite(values).all() else np.nan_to_num(values, posinf=1e100)
        del values


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
    """A named term that is another, one that some tokens or steps lack, one whose coefficient runs
    against the KL, or, of an unknown term, an estimator that is none of a KL.
    """
    best, named = _best(m), m.settings.kl
    if best is None or kl_negative(m) is not None or kl_left_out(m) is not None:
        return None
    partial = _partly_absent(m, best[1])
    if partial is None and best[1] > CONFUSED:
        partial = _jumps(m) or _reversed_controller(m)
    if partial is not None:
        return partial
    evidence: Evidence = {"share that it explains": best[1], "coefficient": best[2]}
    found = best[0] if best[1] >= IDENTIFIED else "something else"
    if named is None:
        expected, right = "a KL estimator", not best[0].startswith((INVERTED, ABSOLUTE))
        right |= best[1] < IDENTIFIED
    else:
        expected = _expected(m.settings)
        share = m.numbers[f"term_is_{expected}"]
        evidence["share that the named term explains"] = share
        right = share > CONFUSED
    return None if right else Shown(evidence, words={"found": found, "named": expected}, case="all")


def _partly_absent(m: Measured, explained: float) -> Shown | None:
    """Tokens without a term among others that have theirs; or, where the squares are explained,
    tokens that have another.
    """
    share, tokens = (m.numbers.get(f"term_absent_{what}", 0.0) for what in ("share", "tokens"))
    off, silent = m.numbers.get("term_off_share", 0.0), m.numbers.get("term_silent_steps", 0.0)
    lacking = share >= MOST_ABSENT and tokens >= FEWEST_ABSENT and off < MOST_ABSENT
    other = explained > CONFUSED and off >= MOST_ABSENT
    if not (lacking or other):
        return None
    evidence: Evidence = {
        "share of the tokens with a log-ratio that have no term": share,
        "share with another than their step's coefficient gives": off,
        "tokens without": int(tokens),
        "share of steps without any": silent,
    }
    where = {
        f"share without, {key.removeprefix('term_absent_').replace('_', ' ')}": value
        for key, value in m.numbers.items()
        if key.startswith("term_absent_") and key not in ("term_absent_share", "term_absent_tokens")
    }
    return Shown(evidence | where, case="steps" if silent > 0 else "tokens")


def _jumps(m: Measured) -> Shown | None:
    jumps, share = (m.numbers.get(name, 0.0) for name in ("term_jumps", "term_jumps_share"))
    if jumps < FEWEST_JUMPS or share < MOST_JUMPS:
        return None
    evidence: Evidence = {"leaps of the coefficient, up and down again": int(jumps)}
    return Shown(evidence, "note" if m.settings.adaptive else None, case="jumps")


def _reversed_controller(m: Measured) -> Shown | None:
    """The coefficient falls while the KL grows, or the other way round: a controller pulls the
    other way, unless the KL is on the other side of its target.
    """
    moved, growth = m.numbers.get("term_late_over_early", 1.0), m.numbers.get("kl_growth", 1.0)
    if moved > 1:
        moved, growth = 1 / moved, 1 / max(growth, 1e-300)
    if moved > 1 / COEFFICIENT_MOVED or growth < KL_MOVED:
        return None
    return Shown(
        {
            "coefficient, last third of the steps over the first": m.numbers[
                "term_late_over_early"
            ],
            "KL, last third of the steps over the first": m.numbers["kl_growth"],
        },
        "note" if m.settings.adaptive else "warning",
        case="reversed",
    )
