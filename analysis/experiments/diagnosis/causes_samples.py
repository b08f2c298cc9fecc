"""Findings about the samples: tokens that nobody drew, and columns of another policy than said."""

from __future__ import annotations

import math

from analysis.experiments.diagnosis.measure import Measured
from analysis.experiments.diagnosis.schema import Finding

#: No update turns a certain token into one of probability below 1/e, and not three at once.
MOST_MASKED = 1e-3
FEWEST_MASKED = 3
#: The bound is on a mean; fewer early ends have too noisy a mean to hold against it.
FEWEST_ENDS = 20
#: Nats beyond the bound: tokens that end a sequence for another reason than being its end token
#: (a stop string, a cut) have the surprise of any token.
END_MARGIN = 3.0
#: The mean of policy over sampler is one to first order; training on the tokens moves it by less.
RATIO_EXCESS = 0.05
#: Where old_logp is not the sampler's, old over policy has mean one, and policy over old has not.
FARTHER = 4.0
#: A temperature one twentieth off changes the surprise by about that share of the entropy.
LARGEST_SURPRISE = 0.05
#: As for the inference engine: a root-mean-square log-ratio of 0.1. Two evaluations of the same
#: weights differ by less, in bfloat16 too.
LARGEST_START_KL = 0.005


def masked_when_scored(m: Measured) -> Finding | None:
    """Counted tokens whose log-prob is an exact zero in one column only."""
    share = m.numbers["masked_when_scored_share"]
    if share < MOST_MASKED or share * m.rollouts.tokens < FEWEST_MASKED - 0.5:
        return None
    return Finding(
        code="masked-when-scored",
        severity="error",
        title="Tokens are counted that were masked when they were scored",
        evidence={"share with log-prob 0 in one column and below -1 in another": share},
        advice="The loss and the scoring pass use different masks: look for a mask shifted by one "
        "token, padding counted as text, or a token after the end of sequence.",
        chapter="11_numerics#ex-where-after",
    )


def unsampled_end(m: Measured) -> Finding | None:
    """Last tokens too surprising to have been drawn."""
    surprise = m.numbers.get("end_surprise", 0.0)
    bound = m.numbers.get("end_surprise_bound", math.inf)
    if surprise <= bound + END_MARGIN or m.numbers["early_ends"] < FEWEST_ENDS:
        return None
    return Finding(
        code="unsampled-end",
        severity="error",
        title="The last counted tokens were not sampled",
        evidence={
            "mean of -log p at sequence ends": surprise,
            "bound if these tokens ended the sequences": bound,
        },
        advice="The mask counts a token after the end of sequence (padding, a newline of the chat "
        "template), or is shifted by one token.",
        chapter="11_numerics#ex-where-after",
    )


def old_not_sampler(m: Measured) -> Finding | None:
    """old_logp from another policy than the one that drew the tokens."""
    ratio = m.identity("policy/old")
    if ratio is None or m.rollouts.sampler_logp is not None or not m.enough:
        return None
    backwards = m.numbers["old_over_policy_mean"]
    if ratio.low < 1 + RATIO_EXCESS or ratio.value - 1 < FARTHER * abs(backwards - 1):
        return None
    return Finding(
        code="old-not-sampler",
        severity="error",
        title="The tokens were not drawn from the policy that old_logp belongs to",
        evidence={
            "mean of policy/old (one if they were)": ratio.value,
            "lower end": ratio.low,
            "mean of old/policy (one if the policy drew them)": backwards,
        },
        advice="Score old_logp with the weights that sample, at the sampling step. Values kept "
        "from an earlier step bias ratio, clip and every off-policy weight.",
        chapter="02_gradients#thm-off-policy-weights",
    )


def other_sampler(m: Measured) -> Finding | None:
    """Tokens more or less surprising than the entropy of the policy that should have drawn them."""
    gap = m.intervals.get("surprise_gap")
    if gap is None or not m.enough or not gap.excludes(0.0):
        return None
    if abs(gap.value) < LARGEST_SURPRISE * m.numbers["entropy"]:
        return None
    hotter = gap.value > 0
    return Finding(
        code="other-sampler",
        severity="error",
        title="The sampler is "
        + ("hotter" if hotter else "colder, or truncated further,")
        + " than the policy that is trained",
        evidence={
            "mean of -log p minus the entropy": gap.value,
            "lower end": gap.low,
            "upper end": gap.high,
            "mean entropy": m.numbers["entropy"],
        },
        advice="Divide the logits by the sampling temperature when scoring, and look for a "
        + ("temperature" if hotter else "top-p, top-k, min-p or a repetition penalty")
        + " in the generation settings that the trainer does not know.",
        chapter="06_sequences#thm-sampling-mask",
    )


def starts_away(m: Measured) -> Finding | None:
    """A policy that is not its reference before anything was trained."""
    distance = m.numbers.get("kl_at_start", 0.0)
    if not distance > LARGEST_START_KL:
        return None
    return Finding(
        code="starts-away",
        severity="warning",
        title="The policy differs from its reference before the first update",
        evidence={"half the mean squared log-ratio at the first step": distance},
        advice="Unless the run starts elsewhere on purpose: load both from the same weights, and "
        "score both with the same prompt, temperature, masks and precision.",
        chapter="05_fixed_points#thm-reverse-optimum",
    )
