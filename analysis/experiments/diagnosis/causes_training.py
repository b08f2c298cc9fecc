"""Findings about the run: its samples, its tails and its clamps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from analysis.experiments.chapters.numerics import overflow_threshold
from analysis.experiments.diagnosis.measure import Measured
from analysis.experiments.diagnosis.schema import Finding, Severity, Tail
from analysis.experiments.diagnosis.tails import infinite_variance
from analysis.kl.term import KLTerm

#: A root-mean-square log-ratio of 0.1 (its square over two): half of what a clip at 0.2 allows is
#: used up before the first update. Rounding to bfloat16 in the engine gives about a tenth of it.
LARGEST_MISMATCH_KL = 0.005
#: A largest ratio below three times the mean cannot hide a tail worth the name, whatever is fitted:
#: at k = 0.7 the largest of a hundred ratios is expected at 25 times the scale.
HARMLESS_RATIO = 3.0
#: The same for the sum of k3: below one percent of it, no single token decides the mean. A tail of
#: index 0.7 gives its largest of n draws a share of n^-0.3, more than that up to four million.
HARMLESS_SHARE = 0.01
#: A tenth of the KL that k1 reads.
LARGEST_UNSEEN_SHARE = 0.1
#: A hundredth of the pull missing; it is always the hundredth that is farthest away.
MOST_DEAD_FORCE = 0.01
#: k3's coefficients deviate from the reverse KL's by half of the latter's spread. For small
#: log-ratios of standard deviation s the gap is s / sqrt(2), so this is far from first order.
LARGEST_GRADIENT_GAP = 0.5
#: One percent of the sequences (at least one) with half of the KL: the mean is about them.
LARGEST_SEQUENCE_SHARE = 0.5
#: With fewer sequences one of them may well hold half.
FEWEST_FOR_SHARES = 10
#: A third of the policy gradient's tokens clipped: more samples are thrown away than PPO's usual
#: few percent by an order of magnitude.
LARGEST_CLIP_FRACTION = 0.3
#: Half a nat per token: the geometric mean ratio to the reference is 1.6 at every token.
FAR = 0.5


def mismatch(m: Measured) -> Finding | None:
    """An inference engine that is not the trainer's old policy."""
    gap = m.numbers.get("mismatch_kl", 0.0)
    if not gap > LARGEST_MISMATCH_KL:
        return None
    return Finding(
        code="train-inference-mismatch",
        severity="error",
        title="The inference engine samples from another policy than the trainer believes",
        evidence={
            "KL of sampler to old policy": gap,
            "effective share of tokens": m.numbers["mismatch_ess"],
            "largest log-ratio": m.numbers["mismatch_largest"],
            "of the total KL of sampler to policy": m.numbers["total_kl"],
        },
        advice="Align first: same temperature, weights synchronised before sampling, same "
        "precision and kernels. Then weigh by old/sampler, truncated (TRL: "
        "vllm_importance_sampling_correction; verl: algorithm.rollout_correction).",
        chapter="06_sequences#thm-two-factors",
    )


def stale_samples(m: Measured) -> Finding | None:
    """A trained policy that has left the one it has samples of."""
    bound = math.log1p(m.settings.epsilon_high) ** 2 / 2
    staleness, clipped = m.numbers.get("staleness_kl", 0.0), m.numbers.get("clip_fraction", 0.0)
    if staleness <= bound and clipped <= LARGEST_CLIP_FRACTION:
        return None
    unweighted = m.settings.kl is None or m.settings.kl.weighting == "none"
    return Finding(
        code="stale-samples",
        severity="error",
        title="The samples are stale: the policy has left the one that drew them",
        evidence={
            "KL of old policy to policy": staleness,
            "at which the usual log-ratio is at the clip": bound,
            "effective share of tokens": m.numbers["staleness_ess"],
            "clip fraction": clipped,
        },
        advice="Fewer updates per batch, or a smaller learning rate. "
        + (
            "Weigh the KL term by policy/old: k3 with the ratio attached, k2 with it detached; "
            "unweighted, the loss follows the sampler."
            if unweighted
            else "The weight corrects the token, not the states before it."
        ),
        chapter="02_gradients#thm-off-policy-weights",
    )


def overflow(m: Measured) -> Finding | None:
    """Tokens at which k3 is infinite in the type that trainers compute it in."""
    bound = overflow_threshold(torch.float32)
    excess = m.rollouts.ref_logp - m.rollouts.logp
    count = int((excess > bound).sum())
    if not count:
        return None
    return Finding(
        code="overflow",
        severity="error",
        title="k3 overflows in float32",
        evidence={"tokens": count, "largest log r": float(excess.max()), "from": bound},
        advice="One such token makes the loss infinite, or NaN once a mask multiplies it. Look at "
        "the tokens (wrong ids or a lost mask, as a rule), and use k2.",
        chapter="11_numerics#overflow",
    )


def heavy_tail(m: Measured) -> Finding | None:
    """A ratio to the reference whose mean cannot be trusted."""
    tail = m.tail("reference/policy")
    harmless = (
        m.numbers["largest_ratio_over_mean"] < HARMLESS_RATIO
        or m.numbers.get("k3_largest_token_share", 1.0) < HARMLESS_SHARE
    )
    if not _untrusted(tail) or harmless:
        return None
    k3 = m.estimate("k3")
    return Finding(
        code="heavy-tail",
        severity="error",
        title="k3's mean and its interval cannot be trusted: the ratio's tail is too heavy",
        evidence={
            "tail index k": tail.k,
            "largest trusted": tail.threshold,
            "fitted with": tail.fitted_with,
            "KL by k3": k3.value,
            "KL by k1": m.estimate("k1").value,
            "k3's squared coefficients on 1% of the tokens": m.numbers.get(
                "k3_top_percent_share", math.nan
            ),
        },
        advice="Read the KL from k1, train with k2 in the loss or k1 in the reward, or sum the KL "
        "over the vocabulary. More samples do not help.",
        chapter="03_k3_counterexample#thm-ratio-tail",
    )


def unseen_mass(m: Measured) -> Finding | None:
    """Mass of the reference on tokens that are not sampled: k3 reads the KL that much too low.

    Token by token ``k1 - k3 = 1 - r``, and the mean of r over the vocabulary is one.
    """
    ratio = m.identity("reference/sampler")
    if ratio is None or not m.enough or heavy_tail(m) is not None:
        return None
    missing, k1 = 1.0 - ratio.value, m.estimate("k1").value
    infinite = infinite_variance(m.tail("reference/policy"))
    if not infinite or ratio.high >= 1.0 or missing < LARGEST_UNSEEN_SHARE * k1:
        return None
    return Finding(
        code="unseen-mass",
        severity="warning",
        title="k3 reads the KL too low: part of the reference lies where nothing is sampled",
        evidence={
            "mass that no sample stands for": missing,
            "KL by k3": m.estimate("k3").value,
            "KL by k1": k1,
        },
        advice="Read the KL from k1, or sum it over the vocabulary. k3 has no bias, but what it "
        "lacks comes in rare tokens with huge values: expect spikes, not a drift. A sampler that "
        "truncates (top-p, top-k) looks the same.",
        chapter="20_language_model#fig-readings",
    )


def dead_zone(m: Measured) -> Finding | None:
    """Tokens whose KL gradient a clamp removes."""
    s = m.settings
    if s.framework == "trl" or not _in_loss(s.kl, ("k2", "k3")):
        return None
    estimator = "k3" if s.kl is None else s.kl.estimator
    force = m.numbers[f"dead_force_{estimator}"]
    if force <= MOST_DEAD_FORCE:
        return None
    severity: Severity = "warning" if s.framework == "unknown" else "error"
    where = "verl and OpenRLHF" if s.framework == "unknown" else s.framework
    return Finding(
        code="dead-zone",
        severity=severity,
        title=f"The clamp of {where} silences the tokens that are farthest away",
        evidence={
            "share of tokens": m.numbers[f"dead_share_{estimator}"],
            "share of the pull they would have": force,
            "estimator": estimator,
        },
        advice="Remove the clamp of the value at 10 and clip the gradient norm instead, or use k2, "
        "whose dead zone begins farther out. TRL has no clamp.",
        chapter="11_numerics#prop-dead-zones",
    )


def k3_gradient(m: Measured) -> Finding | None:
    """k3's gradient far from the reverse KL's."""
    kl = m.settings.kl
    gap = m.numbers.get("k3_gradient_gap", 0.0)
    if not gap > LARGEST_GRADIENT_GAP or not _in_loss(kl, ("k3",)):
        return None
    if kl is not None and kl.weighting == "attached":  # the reverse KL's gradient, exactly
        return None
    return Finding(
        code="k3-gradient",
        severity="warning",
        title="k3's gradient is far from that of the reverse KL",
        evidence={
            "spread of the coefficients' difference over that of the reverse KL's": gap,
            "correlation of the two": m.numbers["k3_gradient_correlation"],
        },
        advice="k3 as a loss descends the forward KL. If the reverse KL is meant, use k2 in the "
        "loss (on stale samples with the detached ratio).",
        chapter="02_gradients#thm-expected-gradients",
    )


def heavy_weights(m: Measured) -> Finding | None:
    """Importance weights whose mean cannot be trusted."""
    tail = m.tail("policy/sampler")
    if not _untrusted(tail):
        return None
    return Finding(
        code="heavy-weights",
        severity="warning",
        title="The importance weights cannot be trusted",
        evidence={"tail index k": tail.k, "largest trusted": tail.threshold},
        advice="Truncate the weights and say so, or sample afresh.",
        chapter="06_sequences#thm-product-variance",
    )


def concentrated(m: Measured) -> Finding | None:
    """A few sequences that carry the KL."""
    share = m.numbers.get("top_percent_sequences_share", 0.0)
    if share <= LARGEST_SEQUENCE_SHARE or m.rollouts.sequences < FEWEST_FOR_SHARES:
        return None
    top = m.top_sequences[0]
    return Finding(
        code="concentrated",
        severity="warning",
        title="A few sequences carry most of the KL",
        evidence={"share of the top 1%": share, "first": top.sequence, "its share": top.share},
        advice="Read these sequences: degenerate loops, another language and cut-off answers are "
        "the usual ones.",
        chapter="03_k3_counterexample#thm-underestimate",
    )


def far_from_reference(m: Measured) -> Finding | None:
    """A policy that has left its reference."""
    k1 = m.estimate("k1")
    if k1.low <= FAR:
        return None
    return Finding(
        code="far-from-reference",
        severity="note",
        title="The policy is far from its reference",
        evidence={"KL by k1, nats per token": k1.value, "lower end": k1.low},
        advice="No fault in itself. First-order arguments about the estimators no longer hold.",
        chapter="04_grpo_ablation#fig-ablation-kl",
    )


def _untrusted(tail: Tail | None) -> bool:
    return tail is not None and tail.k is not None and tail.k > tail.threshold


def _in_loss(kl: KLTerm | None, estimators: Sequence[str]) -> bool:
    """May the term be one of these in the loss? Of an unknown term anything may be."""
    return kl is None or (kl.placement == "loss" and kl.estimator in estimators)
