"""What the updates do: advantages, the KL term's direction, and where the KL goes."""

from __future__ import annotations

from kl_term.diagnosis import groups
from kl_term.diagnosis.conditions.columns import ALL_SILENT, MOST_SILENT
from kl_term.diagnosis.schema import Evidence, Measured, Severity, Shown

#: Group-centred advantages correlate positively with rewards by construction.
NEGATIVE_CORRELATION = -0.2
#: Share of the unexplained variance of advantages; chance gives 1/n.
KL_EXPLAINS = 0.5
#: Below this many sequences correlations and the bootstrap say little.
FEWEST_SEQUENCES = 20
#: Below a tenth of a standard deviation a pull or push explains under 1% of the update; from three
#: times that on it is no longer faint.
SMALLEST_STRENGTH, PLAIN_STRENGTH = 0.1, 0.3
#: A push of every sampled token that is a fifth of the update's spread is no chance: its standard
#: error is the inverse root of the number of tokens, times a design effect of a few.
SMALLEST_PUSH = 0.2
#: Runs start at their reference, so the KL always grows; threefold within one dump, up to a level
#: where the log-ratio is of order a third, is worth an explanation.
LARGEST_GROWTH = 3.0
SMALLEST_GROWN = 0.05
#: Standard deviations of the reward: below a tenth it does not grow; where the interval reaches
#: farther it may.
SMALLEST_GAIN = 0.1


def advantage_sign(m: Measured) -> Shown | None:
    if "group_correlation" in m.numbers:
        evidence: Evidence = {"correlation within groups (one)": m.numbers["group_correlation"]}
        if groups.advantage_reversed(m):
            return Shown(evidence, case="all")
        if not groups.some_reversed(m):
            return None
        evidence["groups in which it is minus one"] = int(m.numbers["groups_reversed"])
        evidence["in which it is one"] = int(m.numbers["groups_following"])
        return Shown(evidence, case="some")
    correlation = m.numbers.get("advantage_reward_correlation", 1.0)
    if correlation > NEGATIVE_CORRELATION or m.rollouts.sequences < FEWEST_SEQUENCES:
        return None
    return Shown({"correlation over sequences": correlation}, case="all")


def advantage_opposed(m: Measured) -> Shown | None:
    """Not where the tokens of an update are other ones: then the response is near zero. Nor where
    old_logp is that of a later update: then what lies between is an update taken back.
    """
    response = m.intervals.get("advantage_strength")
    if response is None or not m.enough or not response.clear_of(0.0):
        return None
    if groups.rescored_throughout(m):
        return None
    if response.value > -SMALLEST_STRENGTH:
        return None
    return Shown(
        {
            "response to the advantage, in standard deviations": response.value,
            "upper end": response.high,
        }
    )


def kl_rewarded(m: Measured) -> Shown | None:
    names = ("kl_in_advantage", "kl_in_token_advantage")
    share = max(m.numbers.get(name, 0.0) for name in names)
    if share < KL_EXPLAINS or m.rollouts.sequences < FEWEST_SEQUENCES:
        return None
    return Shown({"share of the advantage beyond the reward that the KL explains": share})


def kl_maximised(m: Measured) -> Shown | None:
    """An update that repeats the last ones enlarges the log-ratio too: so it is an error only where
    the reward clearly falls, or the KL multiplies and the reward does not grow, and a note wherever
    the reward may drive it.
    """
    strength = m.intervals.get("pull_strength")
    if strength is None or not m.enough or strength.low <= 0 or strength.value < SMALLEST_STRENGTH:
        return None
    growth, reward = m.numbers.get("kl_growth"), m.intervals.get("reward_growth")
    term = m.settings.kl
    if "term_size" in m.numbers:  # the column of the term says its sign
        return None
    if (term is not None and term.estimator == "none") or (growth is not None and growth <= 1):
        return None
    severity: Severity = "note"
    if reward is not None and reward.low <= 0 and strength.value >= PLAIN_STRENGTH:
        multiplied = growth is not None and growth >= LARGEST_GROWTH
        severity = "error" if multiplied and _last_kl(m) >= SMALLEST_GROWN else "warning"
    if reward is not None and reward.value < 0 and reward.clear_of(0.0):  # not once in many checks
        severity = "error"
    evidence: Evidence = {
        "pull per nat (negative: towards the reference)": m.intervals["pull"].value,
        "in standard deviations": strength.value,
        "lower end": strength.low,
    }
    if growth is not None:
        evidence["KL, last third of the steps over the first"] = growth
    if reward is not None:
        evidence |= {
            "reward, last third minus first": reward.value,
            "lower end of that": reward.low,
        }
    return Shown(evidence, severity)


def k1_in_loss(m: Measured) -> Shown | None:
    kl = m.settings.kl
    if kl is None or (kl.estimator, kl.placement) != ("k1", "loss") or kl.weighting == "attached":
        return None
    return Shown({"weighting": kl.weighting})


def penalty_in_reward(m: Measured) -> Shown | None:
    kl = m.settings.kl
    if kl is None or kl.estimator not in ("k2", "k3") or kl.placement != "reward":
        return None
    return Shown({"estimator": kl.estimator}, words={"estimator": kl.estimator})


def uniform_push(m: Measured) -> Shown | None:
    push, strength = m.intervals.get("push"), m.intervals.get("pull_strength")
    if push is None or strength is None or not m.enough:
        return None
    if push.high >= 0 or push.value > -SMALLEST_PUSH:
        return None
    idle = strength.high > -SMALLEST_STRENGTH
    return Shown(
        {
            "push in standard deviations": push.value,
            "upper end": push.high,
            "pull in standard deviations": strength.value,
        },
        "error" if idle else "warning",
        case="no pull" if idle else "pull",
    )


def kl_without_reward(m: Measured) -> Shown | None:
    growth, reward = m.numbers.get("kl_growth", 0.0), m.intervals.get("reward_growth")
    if growth < LARGEST_GROWTH or (reward is not None and reward.value > 0):
        return None
    last = _last_kl(m)
    if last < SMALLEST_GROWN:
        return None
    evidence: Evidence = {
        "KL, last third of the steps over the first": growth,
        "KL in the last third": last,
    }
    if reward is None:
        return Shown(evidence, "note", case="unknown")
    evidence |= {"reward, last third minus first": reward.value, "upper end of that": reward.high}
    flat = reward.high < SMALLEST_GAIN * float(m.rollouts.reward.std())
    return Shown(evidence, "warning" if flat else "note", case="flat")


def no_signal(m: Measured) -> Shown | None:
    share = m.numbers.get("zero_advantage_share", 0.0)
    if share <= MOST_SILENT:
        return None
    everything = share >= ALL_SILENT
    return Shown(
        {"share of sequences": share},
        "error" if everything else "note",
        {"most": "All" if everything else "Most"},
    )


def _last_kl(m: Measured) -> float:
    """KL by k3 in the last third of the steps."""
    third = len(m.by_step) // 3
    return sum(step.k3 for step in m.by_step[-third:]) / third if third else 0.0


def _may_be_loss(m: Measured, *estimators: str) -> bool:
    """May the term be one of these in the loss? Of an unknown term anything may be."""
    kl = m.settings.kl
    return kl is None or (kl.placement == "loss" and kl.estimator in estimators)
