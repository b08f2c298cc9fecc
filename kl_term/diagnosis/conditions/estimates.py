"""What an estimate of the KL can be trusted for: tails, clamps, gradients and shares."""

from __future__ import annotations

import math

import torch

from kl_term.diagnosis.conditions.policies import HARMLESS_RATIO
from kl_term.diagnosis.conditions.updates import FEWEST_SEQUENCES, SMALLEST_GROWN, _may_be_loss
from kl_term.diagnosis.schema import Measured, Shown
from kl_term.diagnosis.statistics import infinite_variance

#: The same for the sum of k3: below one percent of it, no single token decides the mean. A tail of
#: index 0.7 gives its largest of n draws a share of n^-0.3, more than that up to four million.
HARMLESS_SHARE = 0.01
#: From here on the ratio has no mean. Below it k3 converges, only slowly: that is a property of
#: the estimator on a sound run, and no fault of the run.
NO_MEAN_K = 1.0
#: k1 and k3 that read one KL this many times apart disagree beyond what a plot forgives.
OFF_K1 = 2.0
#: A tenth of the KL that k1 reads.
LARGEST_UNSEEN_SHARE = 0.1
#: Estimators whose value a framework clamps so that it takes the gradient with it, as read in
#: chapter 14. TRL clamps nothing, verl k3 alone.
CLAMPED: dict[str, tuple[str, ...]] = {
    "trl": (),
    "plain": (),
    "verl": ("k3",),
    "openrlhf": ("k2", "k3"),
    "unknown": ("k2", "k3"),
}
_CLAMPING = {"k2": "OpenRLHF", "k3": "verl and OpenRLHF"}
#: Of an unknown trainer nobody said that it clamps: a note, and none for a token or two.
FEWEST_DEAD = 3
#: A hundredth of the pull missing; it is always the hundredth that is farthest away.
MOST_DEAD_FORCE = 0.01
#: k3's coefficients deviate from the reverse KL's by half of the latter's spread. For small
#: log-ratios of standard deviation s the gap is s / sqrt(2), so this is far from first order.
LARGEST_GRADIENT_GAP = 0.5
#: One percent of the sequences (at least one) with half of the KL: the mean is about them. With
#: fewer than ten sequences one of them may well hold half.
LARGEST_SEQUENCE_SHARE, FEWEST_FOR_SHARES = 0.5, 10
#: Of that KL; where one token has most of it, the tail of k3 shows, and no sequence.
LARGEST_TOKEN_OF_IT = 0.2
#: Half a nat per token: the geometric mean ratio to the reference is 1.6 at every token.
FAR = 0.5


def overflow(m: Measured) -> Shown | None:
    bound = math.log(torch.finfo(torch.float32).max)
    excess = m.rollouts.ref_logp - m.rollouts.logp
    count = int((excess > bound).sum())
    if not count:
        return None
    return Shown({"tokens": count, "largest log r": float(excess.max()), "from": bound})


def heavy_tail(m: Measured) -> Shown | None:
    """k1 and k3 of a policy differ on the tokens of an earlier one even where both means exist: if
    a ratio corrects the term, or the reward takes it, those of the policy that sampled count.
    """
    tail = m.tail("reference/policy")
    harmless = (
        m.numbers["largest_ratio_over_mean"] < HARMLESS_RATIO
        or m.numbers.get("k3_largest_token_share", 1.0) < HARMLESS_SHARE
    )
    if tail is None or tail.k is None or tail.k <= tail.threshold or harmless:
        return None
    k1, k3 = m.estimate("k1"), m.estimate("k3")
    kl = m.settings.kl
    corrected = kl is not None and (kl.weighting != "none" or kl.placement == "reward")
    if corrected and any(e.samples == "sampling" for e in m.estimates):
        k1, k3 = m.estimate("k1", "sampling"), m.estimate("k3", "sampling")
    apart = k3.value > OFF_K1 * max(k1.value, 0.0) or k1.value > OFF_K1 * k3.value
    return Shown(
        {
            "tail index k": tail.k,
            "largest trusted": tail.threshold,
            "KL by k3": m.estimate("k3").value,
            "KL by k1": m.estimate("k1").value,
            "k3's squared coefficients on 1% of the tokens": m.numbers.get(
                "k3_top_percent_share", math.nan
            ),
        },
        "warning" if tail.k > NO_MEAN_K and k3.value > SMALLEST_GROWN and apart else "note",
    )


def unseen_mass(m: Measured) -> Shown | None:
    """Token by token ``k1 - k3 = 1 - r``, and the mean of r over the vocabulary is one."""
    ratio = m.identity("reference/sampler")
    if ratio is None or not m.enough or heavy_tail(m) is not None:
        return None
    missing, k1 = 1.0 - ratio.value, m.estimate("k1").value
    infinite = infinite_variance(m.tail("reference/policy"))
    if not infinite or ratio.high >= 1 or missing < LARGEST_UNSEEN_SHARE * k1:
        return None  # four errors would ask too much of a mean whose variance is infinite
    if m.estimate("k3").value > (1 - LARGEST_UNSEEN_SHARE) * k1:
        return None  # it has seen that part
    return Shown(
        {
            "mass that no sample stands for": missing,
            "KL by k3": m.estimate("k3").value,
            "KL by k1": k1,
        }
    )


def dead_zone(m: Measured) -> Shown | None:
    framework, kl = m.settings.framework, m.settings.kl
    if not (clamped := CLAMPED[framework]) or not _may_be_loss(m, *clamped):
        return None
    if kl is not None and kl.value is not None:
        return None  # straight-through: only the value that is shown is clamped
    # OpenRLHF's unbiased_gradient is straight-through too; terms of this book clamp nothing.
    if kl is not None and framework != "unknown" and kl.weighting != "none":
        return None
    estimator = "k3" if kl is None else kl.estimator
    force = m.numbers[f"dead_force_{estimator}"]
    dead = m.numbers[f"dead_share_{estimator}"] * m.rollouts.tokens
    unknown = framework == "unknown"
    if force <= MOST_DEAD_FORCE or (unknown and dead < FEWEST_DEAD - 0.5):
        return None
    return Shown(
        {
            "share of tokens": m.numbers[f"dead_share_{estimator}"],
            "share of the pull they would have": force,
            "estimator": estimator,
        },
        "note" if unknown else "error",
        {"framework": framework if not unknown else _CLAMPING[estimator]},
        case="unknown" if unknown else "known",
    )


def k3_gradient(m: Measured) -> Shown | None:
    kl, gap = m.settings.kl, m.numbers.get("k3_gradient_gap", 0.0)
    if not gap > LARGEST_GRADIENT_GAP or not _may_be_loss(m, "k3"):
        return None
    if kl is not None and kl.weighting == "attached":  # the reverse KL's gradient, exactly
        return None
    return Shown(
        {
            "spread of the coefficients' difference over that of the reverse KL's": gap,
            "correlation of the two": m.numbers["k3_gradient_correlation"],
        }
    )


def concentrated(m: Measured) -> Shown | None:
    share = m.numbers.get("top_percent_sequences_share", 0.0)
    if share <= LARGEST_SEQUENCE_SHARE or m.rollouts.sequences < FEWEST_FOR_SHARES:
        return None
    if m.numbers["k3_largest_token_share"] > LARGEST_TOKEN_OF_IT * share:
        return None
    top = m.top_sequences[0]
    return Shown({"share of the top 1%": share, "first": top.sequence, "its share": top.share})


def far_from_reference(m: Measured) -> Shown | None:
    k1 = m.estimate("k1")
    if k1.low <= FAR:
        return None
    return Shown({"KL by k1, nats per token": k1.value, "lower end": k1.low})


def few_sequences(m: Measured) -> Shown | None:
    count = m.rollouts.sequences
    return Shown({"sequences": count}) if count < FEWEST_SEQUENCES else None
