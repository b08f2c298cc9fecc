"""Findings about what the KL term does to the policy: pull, push, or nothing."""

from __future__ import annotations

from typing import TypeGuard

from analysis.experiments.diagnosis.measure import Measured
from analysis.experiments.diagnosis.schema import Finding, Severity
from analysis.kl.term import KLTerm

#: Below a tenth of a standard deviation a pull or push explains under 1% of the update.
SMALLEST_STRENGTH = 0.1
#: While the reward grows, a push up to 1.5 times that may be the reward's own momentum, as it is
#: seen in TRL runs with a sound KL term; up to three times that it can hardly be told from it.
FAINT, EXPLAINED = 1.5, 3.0
#: A push of every sampled token that is a fifth of the update's spread is no chance: its standard
#: error is the inverse root of the number of tokens, times a design effect of a few.
SMALLEST_PUSH = 0.2
#: Runs start at their reference, so the KL always grows; threefold within one dump, up to a level
#: where the log-ratio is of order a third, is worth an explanation.
LARGEST_GROWTH = 3.0
SMALLEST_GROWN = 0.05


def kl_maximised(m: Measured) -> Finding | None:
    """Updates that enlarge the log-ratio to the reference."""
    strength = m.intervals.get("pull_strength")
    if strength is None or not m.enough or strength.low <= 0 or strength.value < SMALLEST_STRENGTH:
        return None
    growth, reward = m.numbers.get("kl_growth"), m.intervals.get("reward_growth")
    if _is(m.settings.kl, "none") or (growth is not None and growth <= 1):
        return None
    severity: Severity = "error"
    rising = reward is not None and reward.high > 0
    if rising and strength.value < EXPLAINED * SMALLEST_STRENGTH:
        # The reward may go on driving the policy where it has driven it before.
        severity = "note" if strength.value < FAINT * SMALLEST_STRENGTH else "warning"
    evidence: dict[str, float | int | str] = {
        "pull per nat (must be negative)": m.intervals["pull"].value,
        "in standard deviations": strength.value,
        "lower end": strength.low,
    }
    if growth is not None:
        evidence["KL, last third of the steps over the first"] = growth
    if reward is not None:
        evidence["reward, last third minus first"] = reward.value
        evidence["upper end of that"] = reward.high
    return Finding(
        code="kl-maximised",
        severity=severity,
        title="Updates push the policy away from its reference",
        evidence=evidence,
        advice="Check the sign of the KL term: it is added to a loss, subtracted from a reward. If "
        "the sign is right, the reward drives the drift and beta is too small to hold it.",
        chapter="02_gradients#thm-expected-gradients",
    )


def kl_without_reward(m: Measured) -> Finding | None:
    """A KL that grows over the steps and buys nothing."""
    growth, reward = m.numbers.get("kl_growth", 0.0), m.intervals.get("reward_growth")
    if growth < LARGEST_GROWTH or (reward is not None and reward.value > 0):
        return None
    last = sum(step.k3 for step in m.by_step[-(len(m.by_step) // 3) :]) / (len(m.by_step) // 3)
    if last < SMALLEST_GROWN:
        return None
    evidence: dict[str, float | int | str] = {
        "KL, last third of the steps over the first": growth,
        "KL in the last third": last,
    }
    if reward is not None:
        evidence["reward, last third minus first"] = reward.value
    return Finding(
        code="kl-without-reward",
        severity="note" if reward is None else "warning",
        title="The KL grows"
        + (" (no reward column to say for what)" if reward is None else ", the reward does not"),
        evidence=evidence,
        advice="Check the sign and the size of beta, and that the KL term reaches the loss. Dump "
        "the step and the reward of each sequence.",
        chapter="04_grpo_ablation#fig-ablation-front",
    )


def k1_in_loss(m: Measured) -> Finding | None:
    """The settings say that k1 is differentiated."""
    kl = m.settings.kl
    if not _is(kl, "k1") or kl.placement != "loss" or kl.weighting == "attached":
        return None
    return Finding(
        code="k1-in-loss",
        severity="error",
        title="k1 as a loss has no expected gradient",
        evidence={"weighting": kl.weighting},
        advice="Move k1 to the reward, or use k2 in the loss: same value, a gradient that pulls.",
        chapter="05_fixed_points#thm-k1-walk",
    )


def penalty_in_reward(m: Measured) -> Finding | None:
    """The settings say that k2 or k3 is subtracted from the reward."""
    kl = m.settings.kl
    if not _is(kl, "k2", "k3") or kl.placement != "reward":
        return None
    return Finding(
        code="penalty-in-reward",
        severity="warning",
        title=f"{kl.estimator} in the reward is the gradient of no KL",
        evidence={"estimator": kl.estimator},
        advice="In the reward use k1: this one loses tokens below the reference, k3 in the end all "
        "but one.",
        chapter="05_fixed_points#thm-k3-plain-flow",
    )


def uniform_push(m: Measured) -> Finding | None:
    """Every sampled token pushed down, whatever its advantage: what k1 as a loss does."""
    push, strength = m.intervals.get("push"), m.intervals.get("pull_strength")
    if (
        push is None
        or strength is None
        or not m.enough
        or push.high >= 0
        or push.value > -SMALLEST_PUSH
    ):
        return None
    idle = strength.high > -SMALLEST_STRENGTH
    return Finding(
        code="uniform-push",
        severity="error" if idle else "warning",
        title="Every sampled token is pushed down, whatever its advantage",
        evidence={
            "push in standard deviations": push.value,
            "upper end": push.high,
            "pull in standard deviations": strength.value,
        },
        advice="That is what k1 as a loss does, and no pull towards the reference is seen: use k2 "
        "(or k3) in the loss, or k1 in the reward."
        if idle
        else "Advantages may be off centre, or part of the KL term is k1 as a loss.",
        chapter="05_fixed_points#thm-k1-walk",
    )


def _is(kl: KLTerm | None, *estimators: str) -> TypeGuard[KLTerm]:
    """Is the term known to be one of these?"""
    return kl is not None and kl.estimator in estimators
