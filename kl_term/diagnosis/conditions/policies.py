"""Which policies drew, scored and train the tokens, and how far apart they are."""

from __future__ import annotations

import math

import numpy as np

from kl_term.diagnosis import groups
from kl_term.diagnosis.conditions.columns import (
    ALL_SILENT,
    FEWEST_IMPOSSIBLE,
    RATIO_MARGIN,
    SAME,
    identical_reference,
)
from kl_term.diagnosis.schema import Evidence, Measured, Severity, Shown
from kl_term.numbers import HALF_WIDTH

#: Rounding keeps the sampled k1 of a policy at its reference this near zero.
SMALLEST_KL = 1e-3
#: Tokens of the reference have k1 near minus k2; a tenth of that is a sampler close to the policy.
SMALLEST_DEFICIT = 0.1
#: The mean of policy over sampler is one to first order; training on the tokens moves it by less.
RATIO_EXCESS = 0.05
#: Where old_logp is not the sampler's, old over policy has mean one, and policy over old has not.
FARTHER = 4.0
#: A temperature one twentieth off changes the surprise by about that share of the entropy.
LARGEST_SURPRISE = 0.05
#: No temperature below two makes tokens more surprising than the entropy by half of it.
UNSAMPLED_SURPRISE = 0.5
#: Half-widths of the interval and shares of the entropy by which first tokens must be too
#: surprising: they are few, and their mean is zero whatever the policy is.
FIRST_CLEAR, LARGEST_FIRST_SURPRISE = 2.0, 0.1
#: A root-mean-square log-ratio of 0.1 (its square over two): half of what a clip at 0.2 allows is
#: used up before the first update. Rounding to bfloat16 in the engine gives about a tenth of it,
#: and so do two evaluations of the same weights.
LARGEST_MISMATCH_KL = LARGEST_START_KL = 0.005
#: A root-mean-square log-ratio of 0.003: float32 gives a thousandth of it; low precision, or
#: another batch in low precision, more. It is a floor under every reading of the KL.
LARGEST_START_NOISE = 5e-6
#: Shares of tokens with log(old/sampler) beyond a hundredth: below at a tenth of them and above at
#: one in two hundred is no noise, but the logarithm of a kept mass.
MOST_BELOW, MOST_ABOVE = 0.1, 0.005
#: An engine whose usual log-ratio to the reference is so small a share of the trainer's has the
#: reference's weights; one that follows is as far away as the trainer.
AT_REFERENCE_SHARE = 0.02
#: Log-probs of one policy, written with seven digits.
SAME_POLICY = 1e-6
#: A fifth of the rows; copies by chance are fewer.
MOST_REPEATED = 0.2
#: One such step may have had a learning rate of zero, as the first of a warm-up has.
FEWEST_RESCORED = 2
#: Standard errors by which log(old/sampler) must rise with the advantage: numerics have no side.
CLEAR_RESPONSE = 4.0
#: A third of the policy gradient's tokens clipped: more samples are thrown away than PPO's usual
#: few percent by an order of magnitude.
LARGEST_CLIP_FRACTION = 0.3
#: Times the KL at which the usual log-ratio is at the clip: a run with a few updates a rollout
#: passes one of them; at five, the usual log-ratio is twice the clip's.
FAR_STALE = 5.0
#: The clip of a token's ratio where the run clips that of a sequence: GSPO's is a thousand times
#: narrower and clips a good share by design.
TOKEN_EPSILON = 0.2
#: A largest ratio below three times the mean cannot hide a tail worth the name, whatever is fitted:
#: at k = 0.7 the largest of a hundred ratios is expected at 25 times the scale.
HARMLESS_RATIO = 3.0
#: Weights that are worth half of the tokens.
FEWEST_EFFECTIVE = 0.5


def negative_kl(m: Measured) -> Shown | None:
    own = any(estimate.samples == "sampling" for estimate in m.estimates)
    k1, k2 = (m.estimate(name, "sampling" if own else "logged") for name in ("k1", "k2"))
    log_ratio = m.rollouts.old_logp - m.rollouts.ref_logp
    # k1 of the reference's tokens is near -k2 close by, and no farther off than the mean of |l|.
    size = min(k2.value, float(np.abs(log_ratio).mean()))
    if k1.high >= -max(SMALLEST_KL, SMALLEST_DEFICIT * size) or not m.enough:
        return None
    if groups.scored_twice(m) is not None:
        return None  # noise in the policy's score lowers it
    backwards = float(np.exp(np.clip(log_ratio, None, 50)).mean())
    exchanged = abs(backwards - 1) < RATIO_MARGIN
    if m.numbers.get("mismatch_kl", 0.0) > LARGEST_MISMATCH_KL and _drawn_as_reported(m):
        return None  # they are the engine's, which is said of it or of weights that are behind
    if train_inference_mismatch(m) is not None and (not exchanged or _which_engine(m) == "start"):
        return None  # says why
    return Shown(
        {"mean of k1": k1.value, "upper end": k1.high, "mean of pi/pi_ref": backwards},
        case="exchanged" if exchanged else "other",
    )


def old_not_sampler(m: Measured) -> Shown | None:
    ratio = m.identity("policy/old")
    if ratio is None or m.rollouts.sampler_logp is not None or not m.enough:
        return None
    backwards = m.numbers["old_over_policy_mean"]
    if ratio.low < 1 + RATIO_EXCESS or ratio.value - 1 < FARTHER * abs(backwards - 1):
        return None
    return Shown(
        {
            "mean of policy/old (one if they were)": ratio.value,
            "lower end": ratio.low,
            "mean of old/policy (one if the policy drew them)": backwards,
        }
    )


def other_sampler(m: Measured) -> Shown | None:
    gap = m.intervals.get("surprise_gap")
    if gap is None or not m.enough:
        return None
    if not gap.clear_of(0.0) or abs(gap.value) < LARGEST_SURPRISE * m.numbers["entropy"]:
        return _first_token(m)
    if m.numbers.get("left_out_share", 0.0) > groups.MOST_LEFT_OUT:
        return None  # what was left out, such as cut completions, was chosen by its tokens
    why = (
        groups.padded_positions,
        groups.counted_prompt,
        groups.duplicates,
        train_inference_mismatch,
    )
    stale = stale_samples(m)
    if any(cause(m) for cause in why) or (stale is not None and stale.severity == "error"):
        return None
    unsampled = gap.value > UNSAMPLED_SURPRISE * m.numbers["entropy"]
    return Shown(
        {
            "mean of -log p minus the entropy": gap.value,
            "lower end": gap.low,
            "upper end": gap.high,
            "mean entropy": m.numbers["entropy"],
        },
        case="unsampled" if unsampled else "hotter" if gap.value > 0 else "colder",
    )


def _first_token(m: Measured) -> Shown | None:
    """Of another distribution at first tokens alone, which are too few to be seen in the mean."""
    gap = m.intervals.get("first_surprise_gap")
    if gap is None or not gap.value - FIRST_CLEAR * (gap.value - gap.low) > 0:
        return None
    if gap.value < LARGEST_FIRST_SURPRISE * m.numbers["entropy"]:
        return None
    if groups.counted_prompt(m) or groups.padded_positions(m) or groups.duplicates(m):
        return None
    evidence: Evidence = {
        "mean of -log p minus the entropy, first tokens": gap.value,
        "lower end": gap.low,
        "mean entropy": m.numbers["entropy"],
    }
    return Shown(evidence, case="first")


def starts_away(m: Measured) -> Shown | None:
    distance = m.numbers.get("kl_at_start", 0.0)
    if not distance > LARGEST_START_NOISE or groups.scored_twice(m) is not None:
        return None
    far = distance > LARGEST_START_KL
    return Shown(
        {"half the mean squared log-ratio at the first step": distance},
        None if far else "note",
        case="far" if far else "noise",
    )


def train_inference_mismatch(m: Measured) -> Shown | None:
    """A truncated sampler that reports what it kept is one at any size: its ratio is one-signed."""
    gap = m.numbers.get("mismatch_kl", 0.0)
    above, below = (m.numbers.get(f"mismatch_{side}", 0.0) for side in ("above", "below"))
    truncated = below > MOST_BELOW and above < MOST_ABOVE
    small = gap <= LARGEST_MISMATCH_KL
    if small and not (
        m.enough and (truncated or (gap > LARGEST_START_NOISE and _trained_since(m)))
    ):
        return None
    evidence: Evidence = {
        "KL of sampler to old policy": gap,
        "effective share of tokens": m.numbers["mismatch_ess"],
        "largest log-ratio": m.numbers["mismatch_largest"],
        "of the total KL of sampler to policy": m.numbers["total_kl"],
        "share of tokens with old clearly below sampler": below,
        "clearly above": above,
    }
    case = "truncated" if truncated else "weights" if small else _which_engine(m)
    if not truncated and _old_is_later(m, case):
        return None
    if case == "weights":
        if "mismatch_kl_early" in m.numbers:
            evidence["KL in the first step"] = m.numbers["mismatch_kl_early"]
            evidence["in the last third of the steps"] = m.numbers["mismatch_kl_late"]
        if (response := m.intervals.get("engine_response")) is not None:
            evidence["rise of log(old/sampler) with the advantage"] = response.value
    if case == "raw":
        evidence["mean of sampler/old (one if old drew the tokens)"] = m.numbers[
            "sampler_over_old_mean"
        ]
    severity: Severity | None = None if not small else "warning" if truncated else "note"
    return Shown(evidence, severity, case=case)


def _trained_since(m: Measured) -> bool:
    """Did training make the difference of engine and trainer, as far as the advantages tell?"""
    response = m.intervals.get("engine_response")
    if response is None:
        return False
    error = (response.value - response.low) / HALF_WIDTH
    return response.value > CLEAR_RESPONSE * error


def _drawn_as_reported(m: Measured) -> bool:
    """Does the engine report the policy that drew the tokens? Then others over it have mean one."""
    means = [m.identity(f"{name}/sampler") for name in ("old", "reference")]
    return all(mean is not None and abs(mean.value - 1) < RATIO_MARGIN for mean in means)


def _old_is_later(m: Measured, case: str) -> bool:
    """Do engine and trainer agree on fresh tokens, and is it said that ``old_logp`` is not of them?

    It was scored again at later steps, which :func:`ratio_is_one` says, or a column says how far
    the engine's weights are behind.
    """
    if m.numbers.get("behind_share", 0.0) >= MOST_REPEATED:
        early = m.numbers["mismatch_kl_early"] if case == "weights" else math.inf
        return m.numbers.get("mismatch_kl_ahead", early) <= LARGEST_MISMATCH_KL
    fresh = m.numbers.get("mismatch_kl_fresh", math.inf)
    return fresh <= LARGEST_MISMATCH_KL and ratio_is_one(m) is not None


def _which_engine(m: Measured) -> str:
    """Why an engine that does not truncate disagrees with the trainer, as far as a dump tells."""
    to_reference, away = (m.numbers[f"{name}_to_reference"] for name in ("sampler", "old"))
    if to_reference < AT_REFERENCE_SHARE * away:
        return "start"
    early, late = (m.numbers.get(f"mismatch_kl_{when}", math.nan) for when in ("early", "late"))
    if early < LARGEST_START_NOISE and late > LARGEST_MISMATCH_KL:
        return "weights"
    drawn, reported = m.numbers["sampler_over_old_mean"], m.identity("old/sampler")
    far = reported is not None and abs(reported.value - 1) >= RATIO_MARGIN
    if far and reported is not None and reported.clear_of(1.0) and abs(drawn - 1) < RATIO_EXCESS:
        return "raw"
    return "weights" if m.enough and _trained_since(m) else "other"


def sampler_filled(m: Measured) -> Shown | None:
    """Infinities and numbers that no log-prob has were read as missing, and so was a number that
    stands at many tokens which the trainer finds otherwise.
    """
    filled, value = m.rollouts.filled, f"{m.rollouts.filler:g}"
    if filled < FEWEST_IMPOSSIBLE:
        return None
    evidence: Evidence = {"share of tokens": filled / m.rollouts.tokens, "value": value}
    return Shown(evidence, words={"value": value})


def ratio_is_one(m: Measured) -> Shown | None:
    """Where completions return at later steps, or a column says that updates lie between, a policy
    that is its own old policy throughout was scored again.
    """
    if not m.rollouts.has_old_logp or identical_reference(m) is not None:
        return None
    same = float((np.abs(m.rollouts.logp - m.rollouts.old_logp) < SAME_POLICY).mean())
    repeated = m.numbers.get("repeated_share", 0.0)
    behind = m.numbers.get("behind_share", 0.0)
    if same < SAME:
        return _rescored_at_times(m)
    if max(repeated, behind) < MOST_REPEATED:
        return _one_for_all_minibatches(m, same)
    evidence: Evidence = {"share of tokens with logp equal to old_logp": same}
    if repeated >= MOST_REPEATED:
        name = "share of rows whose completion stood there at an earlier step"
        return Shown(evidence | {name: repeated}, case="again")
    return Shown(evidence | {"share of tokens from earlier weights": behind}, "note", case="behind")


def _one_for_all_minibatches(m: Measured, same: float) -> Shown | None:
    """Each completion stands once, but the settings say that several steps are on one rollout."""
    step, own = m.rollouts.step, m.settings.rollout_steps
    steps = 0 if step is None else len(np.unique(step))
    idle = m.numbers.get("zero_advantage_share", 0.0) >= ALL_SILENT  # nothing moves the policy
    if own == 1 or steps < own or idle:
        return None
    evidence: Evidence = {
        "share of tokens with logp equal to old_logp": same,
        "steps on one rollout, by the settings": own,
    }
    return Shown(evidence, case="again")


def _rescored_at_times(m: Measured) -> Shown | None:
    """At some of the steps that return to a batch, a first one of rate zero excepted."""
    returning, rescored = (
        m.numbers.get(f"{name}_steps", 0.0) for name in ("returning", "rescored")
    )
    if rescored < FEWEST_RESCORED or rescored < MOST_REPEATED * returning:
        return None
    evidence: Evidence = {
        "steps that train on an earlier batch again": int(returning),
        "of them with a ratio of one": int(rescored),
        "share of the completions that this is true of": m.numbers["rescored_share"],
    }
    return Shown(evidence, case="again")


def stale_samples(m: Measured) -> Shown | None:
    by_sequence = m.settings.ratio_level == "sequence"
    epsilon = TOKEN_EPSILON if by_sequence else m.settings.epsilon_high
    bound = math.log1p(epsilon) ** 2 / 2
    staleness, clipped = m.numbers.get("staleness_kl", 0.0), m.numbers.get("clip_fraction", 0.0)
    clipped = 0.0 if by_sequence else clipped
    if staleness <= bound and clipped <= LARGEST_CLIP_FRACTION:
        return None
    weighted = m.settings.kl is not None and m.settings.kl.weighting != "none"
    far = staleness > FAR_STALE * bound or clipped > LARGEST_CLIP_FRACTION
    return Shown(
        {
            "KL of old policy to policy": staleness,
            "at which the usual log-ratio is at the clip": bound,
            "effective share of tokens": m.numbers["staleness_ess"],
            "clip fraction": clipped,
        },
        "error" if far else "note",
        case="weighted" if weighted else "unweighted",
    )


def heavy_weights(m: Measured) -> Shown | None:
    tail = m.tail("policy/sampler")
    if tail is None or tail.k is None or tail.k <= tail.threshold:
        return None
    log_weight = m.rollouts.logp - m.rollouts.behaviour_logp
    if log_weight.max() < math.log(HARMLESS_RATIO):  # beside a mean of one
        return None
    effective = m.numbers.get("total_ess", m.numbers.get("staleness_ess", 1.0))
    return Shown(
        {
            "tail index k": tail.k,
            "largest trusted": tail.threshold,
            "effective share of tokens": effective,
        },
        "warning" if effective < FEWEST_EFFECTIVE else "note",
    )
