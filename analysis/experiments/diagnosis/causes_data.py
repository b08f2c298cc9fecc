"""Findings about the dump itself: columns that are not what they say."""

from __future__ import annotations

import numpy as np

from analysis.experiments.diagnosis import integrity
from analysis.experiments.diagnosis.dynamics import LAST_FIRST_STEP
from analysis.experiments.diagnosis.measure import Measured
from analysis.experiments.diagnosis.schema import Finding
from analysis.experiments.diagnosis.tails import infinite_variance

#: The bound on drawing a token below -25 nats is 4e-6; this is 25 times that.
MOST_IMPOSSIBLE = 1e-4
#: One such token can be a glitch of one sequence; three are a pattern.
FEWEST_IMPOSSIBLE = 3
#: Runs of four or more bitwise equal pairs of log-probs do not occur in text; 2% is a mask's work.
MOST_CONSTANT_ENDS = 0.02
#: Log-probs of neighbouring tokens are nearly uncorrelated; a shift that correlates better by this
#: much is no chance with thirty pairs or more.
SHIFT_MARGIN = 0.2
#: Random float32 log-probs fall on a bfloat16 grid once in a hundred; nine in ten is a type.
GRID_SHARE = 0.9
#: Both policies find the same tokens easy; at a KL of one nat per token the correlation is still
#: above one half.
UNRELATED = 0.3
#: Rounding adds half its variance to k3; with less than ten times that, the KL is mostly rounding.
NOISE_MARGIN = 10.0
#: The mean ratio is one exactly, so a tenth is no sampling noise once the interval stays half of
#: that away from one; smaller offsets come from top-p and low-precision inference.
RATIO_MARGIN = 0.1
#: A log-ratio within 1e-4 of 10 or 20 has probability of order 1e-5 in any smooth distribution.
MOST_AT_CLAMP = 1e-3
#: Rounding keeps the sampled k1 of a policy at its reference this near zero.
SMALLEST_KL = 1e-3
#: Tokens of the reference have k1 near minus k3; a tenth of that is a sampler close to the policy.
SMALLEST_DEFICIT = 0.1
#: Share of the unexplained variance of advantages; chance gives 1/n.
KL_EXPLAINS = 0.5
#: Group-centred advantages correlate positively with rewards by construction.
NEGATIVE_CORRELATION = -0.2
#: Below this many sequences the correlations and the bootstrap say little.
FEWEST_SEQUENCES = 20
#: With more than half of the sequences silent, the batch trains mostly on the KL.
MOST_SILENT = 0.5


def counted_padding(m: Measured) -> Finding | None:
    """Padding that the mask does not exclude."""
    constant = m.numbers["constant_end_share"]
    impossible = _impossible(m)
    if constant <= MOST_CONSTANT_ENDS and not (impossible and m.numbers["equal_ends"]):
        return None
    return Finding(
        code="counted-padding",
        severity="error",
        title="Padding is counted as text",
        evidence={
            "share in constant runs at sequence ends": constant,
            "share of tokens the sampler cannot have drawn": m.numbers["impossible_share"],
            "all sequences end at one position": "yes" if m.numbers["equal_ends"] else "no",
        },
        advice="Dump the completion mask (1 = counted) and multiply nothing by it: select. In the "
        "trainer, check that the loss uses the same mask.",
        chapter="11_numerics#ex-where-after",
    )


def impossible_tokens(m: Measured) -> Finding | None:
    """Tokens that whoever sampled cannot have drawn."""
    if not _impossible(m) or m.numbers["equal_ends"]:
        return None
    return Finding(
        code="impossible-tokens",
        severity="error",
        title="Some counted tokens cannot have been sampled",
        evidence={
            "share below -25 nats": m.numbers["impossible_share"],
            "largest possible share": integrity.LARGEST_VOCABULARY * float(np.exp(-25.0)),
        },
        advice="Look for prompt or tool tokens inside the mask, another tokenisation, or log-probs "
        "gathered with the wrong ids.",
        chapter="06_sequences#thm-sampling-mask",
    )


def misaligned(m: Measured) -> Finding | None:
    """A column shifted by a token."""
    for name in ("ref", "old", "sampler"):
        aligned = m.numbers.get(f"aligned_{name}", 1.0)
        shifted = m.numbers.get(f"shifted_{name}", 0.0)
        if shifted > max(0.5, aligned + SHIFT_MARGIN):
            return Finding(
                code="misaligned",
                severity="error",
                title=f"The {name} log-probs are those of a neighbouring token",
                evidence={"correlation as dumped": aligned, "one token later or earlier": shifted},
                advice="Logits at position t predict token t+1: shift logits or ids by one, "
                "in exactly one of the two places.",
                chapter="01_estimators#thm-unbiased",
            )
        if aligned < UNRELATED:
            return Finding(
                code="misaligned",
                severity="error",
                title=f"The {name} log-probs are not those of these tokens",
                evidence={"correlation with logp": aligned},
                advice="Look for rows in another order (a batch shuffled after scoring), another "
                "prompt or another model.",
                chapter="01_estimators#thm-unbiased",
            )
    return None


def identical_reference(m: Measured) -> Finding | None:
    """A reference that is the policy."""
    same = {
        name: float((values == m.rollouts.ref_logp).mean())
        for name, values in (("logp", m.rollouts.logp), ("old_logp", m.rollouts.old_logp))
    }
    name = max(same, key=lambda key: same[key])
    if same[name] < 0.999:
        return None
    step = m.rollouts.step
    begins = step is not None and step.max() <= LAST_FIRST_STEP
    return Finding(
        code="identical-reference",
        severity="note" if begins else "error",
        title="The reference is the policy itself",
        evidence={f"share of tokens with ref_logp equal to {name}": same[name]},
        advice="Expected only before the first update. Otherwise the reference is synchronised at "
        "every step, or the adapter stays on when the reference is evaluated.",
        chapter="05_fixed_points#thm-reverse-optimum",
    )


def negative_kl(m: Measured) -> Finding | None:
    """A KL that comes out negative beyond its noise."""
    own = any(estimate.samples == "sampling" for estimate in m.estimates)
    k1, k3 = (m.estimate(name, "sampling" if own else "logged") for name in ("k1", "k3"))
    backwards = float(np.exp(np.clip(m.rollouts.old_logp - m.rollouts.ref_logp, None, 50)).mean())
    if k1.high >= -max(SMALLEST_KL, SMALLEST_DEFICIT * k3.value) or not m.enough:
        return None
    exchanged = abs(backwards - 1) < RATIO_MARGIN
    return Finding(
        code="negative-kl",
        severity="error",
        title="The KL is negative: the tokens are not the policy's"
        + (", but the reference's" if exchanged else ""),
        evidence={"mean of k1": k1.value, "upper end": k1.high, "mean of pi/pi_ref": backwards},
        advice="Policy and reference are exchanged, in the dump or in the loss (that maximises "
        "the KL)."
        if exchanged
        else "A mean of log pi - log pi_ref below zero needs a sampler that is not pi: another "
        "checkpoint, temperature or prompt template.",
        chapter="01_estimators#thm-unbiased",
    )


def coarse_logprobs(m: Measured) -> Finding | None:
    """Log-probs rounded to a coarse type."""
    for column, values in (("logp", m.rollouts.logp), ("ref_logp", m.rollouts.ref_logp)):
        for grid in integrity.GRIDS:
            share = m.numbers.get(f"grid_{column}_{grid.replace(' ', '_')}", 0.0)
            if share < GRID_SHARE or not m.enough:
                continue
            floor = integrity.rounding_noise(values, grid)
            value = m.estimate("k3").value
            return Finding(
                code="coarse-logprobs",
                severity="error" if value < NOISE_MARGIN * floor else "warning",
                title=f"The log-probs were rounded ({grid})",
                evidence={
                    f"share of {column} on the grid": share,
                    "KL that rounding alone gives": floor,
                    "KL by k3": value,
                },
                advice="Take log_softmax of float32 logits and keep the result in float32; dump at "
                "least six digits.",
                chapter="11_numerics#fig-cancellation",
            )
    return None


def clamped_values(m: Measured) -> Finding | None:
    """Log-ratios that sit at a clamp."""
    share = m.numbers["clamped_share"]
    if share < MOST_AT_CLAMP:
        return None
    return Finding(
        code="clamped-values",
        severity="warning",
        title="Log-ratios sit exactly at a clamp",
        evidence={"share at 10 or 20 nats": share},
        advice="Dump the log-probs before any clamp. In training such tokens have no KL gradient.",
        chapter="11_numerics#prop-dead-zones",
    )


def ratio_mean(m: Measured) -> Finding | None:
    """A ratio whose mean is not one: some column belongs to another distribution."""
    heavy = infinite_variance(m.tail("reference/policy"))
    for ratio in ("old/sampler", "reference/sampler"):
        mean = m.identity(ratio)
        if mean is None or abs(mean.value - 1) < RATIO_MARGIN or not m.enough:
            continue
        if mean.low < 1 + RATIO_MARGIN / 2 and mean.high > 1 - RATIO_MARGIN / 2:
            continue
        if heavy and mean.value < 1:
            continue  # the missing mass is in the tail that was not seen
        return Finding(
            code="ratio-mean",
            severity="warning",
            title=f"The mean of {ratio} is not one",
            evidence={"mean": mean.value, "low": mean.low, "high": mean.high},
            advice="Score with the sampling temperature (divide the logits by it) and the same "
            "prompt template everywhere; below one, the sampler truncates (top-p, top-k).",
            chapter="06_sequences#thm-sampling-mask",
        )
    return None


def advantage_sign(m: Measured) -> Finding | None:
    """Advantages that fall where rewards rise."""
    correlation = m.numbers.get("advantage_reward_correlation", 1.0)
    if correlation > NEGATIVE_CORRELATION or m.rollouts.sequences < FEWEST_SEQUENCES:
        return None
    return Finding(
        code="advantage-sign",
        severity="error",
        title="Advantages fall where rewards rise",
        evidence={"correlation over sequences": correlation},
        advice="Check the sign of the advantages before anything else.",
        chapter="09_advantages#thm-baseline",
    )


def kl_rewarded(m: Measured) -> Finding | None:
    """A KL that enters the advantage with a plus."""
    names = ("kl_in_advantage", "kl_in_token_advantage")
    share = max(m.numbers.get(name, 0.0) for name in names)
    if share < KL_EXPLAINS or m.rollouts.sequences < FEWEST_SEQUENCES:
        return None
    return Finding(
        code="kl-rewarded",
        severity="error",
        title="Advantages rise with the KL: it is maximised",
        evidence={"share of the advantage beyond the reward that the KL explains": share},
        advice="The penalty is subtracted from the reward: r - beta (log pi - log pi_ref).",
        chapter="08_reward_side#thm-folded-reward",
    )


def no_signal(m: Measured) -> Finding | None:
    """Batches without advantages."""
    share = m.numbers.get("zero_advantage_share", 0.0)
    if share <= MOST_SILENT:
        return None
    return Finding(
        code="no-signal",
        severity="note",
        title="Most sequences have advantage zero",
        evidence={"share of sequences": share},
        advice="They still get the KL's gradient: the effective beta is larger than it looks. "
        "Filter such groups or change the difficulty of the prompts.",
        chapter="08_reward_side#fig-equal-rewards",
    )


def few_sequences(m: Measured) -> Finding | None:
    """Too few sequences for the intervals."""
    if m.rollouts.sequences >= FEWEST_SEQUENCES:
        return None
    return Finding(
        code="few-sequences",
        severity="note",
        title="Few sequences: the intervals are too narrow",
        evidence={"sequences": m.rollouts.sequences},
        advice=f"Dump at least {FEWEST_SEQUENCES} sequences; a hundred are better.",
        chapter="03_k3_counterexample#thm-underestimate",
    )


def _impossible(m: Measured) -> bool:
    share = m.numbers["impossible_share"]
    return share > MOST_IMPOSSIBLE and share * m.rollouts.tokens > FEWEST_IMPOSSIBLE - 0.5
