"""When a cause applies: one function a cause, from measurements to the evidence or None.

Every threshold has its reason beside it. :mod:`kl_term.diagnosis.causes` says what each means.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from kl_term.diagnosis import groups, integrity
from kl_term.diagnosis.schema import Evidence, Measured, Severity, Shown
from kl_term.diagnosis.statistics import infinite_variance
from kl_term.diagnosis.updates import LAST_FIRST_STEP

#: The bound on drawing a token below -25 nats is 4e-6; this is 25 times that.
MOST_IMPOSSIBLE = 1e-4
#: One such token can be a glitch of one sequence; three are a pattern.
FEWEST_IMPOSSIBLE = 3
#: Runs of four or more bitwise equal pairs of log-probs do not occur in text; 2% is a mask's work.
MOST_CONSTANT_ENDS = 0.02
#: Log-probs of neighbouring tokens are nearly uncorrelated; a shift that correlates better by this
#: much is no chance with thirty pairs or more.
SHIFT_MARGIN = 0.2
#: Standard errors of a correlation: an entropy that is its token's own has the expected one, and
#: that of the next token may have a larger one in text where tokens say what follows.
CLEAR_SHIFT = 4.0
#: Both policies find the same tokens easy; at a KL of one nat per token the correlation is still
#: above one half.
UNRELATED = 0.3
#: Log-probs of other tokens make the mean ratio explode, a policy that is far away does not: its
#: mean is at most one.
UNRELATED_RATIO = 1.5
#: The first updates turn no certain token into one of probability below 1/e, and not three at once.
MOST_MASKED = 1e-3
#: The bound is on a mean; fewer early ends have too noisy a mean to hold against it.
FEWEST_ENDS = 20
#: Nats beyond the bound: tokens that end a sequence for another reason than being its end token
#: (a stop string, a cut) have the surprise of any token.
END_MARGIN = 3.0
#: Equal but for rounding.
SAME = 0.999
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
#: Random float32 log-probs fall on a bfloat16 grid once in a hundred; nine in ten is a type.
GRID_SHARE = 0.9
#: Rounding adds half its variance to k3; with less than ten times that, the KL is mostly rounding.
NOISE_MARGIN = 10.0
#: A log-ratio within 1e-4 of 10 or 20 has probability of order 1e-5 in any smooth distribution.
MOST_AT_CLAMP = 1e-3
#: The mean ratio is one exactly, so a tenth is no sampling noise where it is four standard errors
#: away; smaller offsets come from top-p and low-precision inference.
RATIO_MARGIN = 0.1
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
#: Weights that are worth half of the tokens.
FEWEST_EFFECTIVE = 0.5
#: Half a nat per token: the geometric mean ratio to the reference is 1.6 at every token.
FAR = 0.5
#: With more than half of the sequences silent, the batch trains mostly on the KL; with all, on
#: nothing else.
MOST_SILENT, ALL_SILENT = 0.5, 0.99


# The dump: columns that are not what they say.


def counted_padding(m: Measured) -> Shown | None:
    constant, inner = (m.numbers[f"constant_{where}_share"] for where in ("end", "inner"))
    impossible = _impossible(m) and m.numbers["equal_ends"]
    if constant <= max(MOST_CONSTANT_ENDS, inner) and not impossible:
        return None
    return Shown(
        {
            "share in constant runs at sequence ends": constant,
            "share of tokens the sampler cannot have drawn": m.numbers["impossible_share"],
            "all sequences end at one position": "yes" if m.numbers["equal_ends"] else "no",
        }
    )


def misaligned(m: Measured) -> Shown | None:
    for name in ("ref", "old", "sampler"):
        aligned = m.numbers.get(f"aligned_{name}", 1.0)
        shifted = m.numbers.get(f"shifted_{name}", 0.0)
        if shifted > max(0.5, aligned + SHIFT_MARGIN):
            evidence: Evidence = {
                "correlation as dumped": aligned,
                "one token later or earlier": shifted,
            }
            return Shown(evidence, words={"column": name})
    aligned, shifted = (m.numbers.get(f"{how}_entropy", 0.0) for how in ("aligned", "shifted"))
    chance = CLEAR_SHIFT / math.sqrt(m.numbers.get("aligned_pairs", math.inf))
    as_it_should = aligned + chance > m.numbers.get("expected_entropy", 0.0)
    if shifted > aligned + max(SHIFT_MARGIN, chance) and not as_it_should and m.enough:
        both: Evidence = {
            "correlation of -log p with the entropy, as dumped": aligned,
            "one token later or earlier": shifted,
        }
        return Shown(both, words={"column": "policy's own"})
    return None


def other_tokens(m: Measured) -> Shown | None:
    for name in ("ref", "old", "sampler"):
        aligned = m.numbers.get(f"aligned_{name}", 1.0)
        ratio = m.numbers.get(f"ratio_{name}", 1.0)
        if aligned < UNRELATED and ratio > UNRELATED_RATIO and misaligned(m) is None:
            return Shown(
                {"correlation with logp": aligned, "mean ratio to logp": ratio},
                words={"column": name},
            )
    return None


def masked_when_scored(m: Measured) -> Shown | None:
    share, count = (m.numbers[f"masked_when_scored_{what}"] for what in ("share", "tokens"))
    if share < MOST_MASKED or count < FEWEST_IMPOSSIBLE:
        return None
    return Shown({"share with log-prob 0 in one column and below -1 in another": share})


def unsampled_end(m: Measured) -> Shown | None:
    surprise = m.numbers.get("end_surprise", 0.0)
    bound = m.numbers.get("end_surprise_bound", math.inf)
    if surprise <= bound + END_MARGIN or m.numbers["early_ends"] < FEWEST_ENDS:
        return None
    return Shown(
        {
            "mean of -log p at sequence ends": surprise,
            "bound if these tokens ended the sequences": bound,
        }
    )


def impossible_tokens(m: Measured) -> Shown | None:
    if not _impossible(m) or m.numbers["equal_ends"]:
        return None
    return Shown(
        {
            "share below -25 nats": m.numbers["impossible_share"],
            "largest possible share": integrity.LARGEST_VOCABULARY * math.exp(-25.0),
        }
    )


def identical_reference(m: Measured) -> Shown | None:
    same = {
        name: float((getattr(m.rollouts, name) == m.rollouts.ref_logp).mean())
        for name in ("logp", "old_logp")
    }
    name = max(same, key=lambda key: same[key])
    if same[name] < SAME:
        return None
    step = m.rollouts.step
    begins = step is not None and step.max() <= max(LAST_FIRST_STEP, m.settings.rollout_steps - 1)
    idle = m.numbers.get("zero_advantage_share", 0.0) >= ALL_SILENT  # nothing moves the policy
    return Shown(
        {f"share of tokens with ref_logp equal to {name}": same[name]},
        "note" if begins or idle else "error",
        case="of old_logp" if same["logp"] < SAME else "of logp",
    )


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
    if gap is None or not m.enough or not gap.clear_of(0.0):
        return None
    if abs(gap.value) < LARGEST_SURPRISE * m.numbers["entropy"]:
        return None
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


def coarse_logprobs(m: Measured) -> Shown | None:
    for column in ("logp", "ref_logp", "old_logp", "sampler_logp"):
        for grid in integrity.GRIDS:
            share = m.numbers.get(integrity.on_grid(column, grid), 0.0)
            if share < GRID_SHARE or not m.enough:
                continue
            floor = integrity.rounding_noise(getattr(m.rollouts, column), grid)
            value = m.estimate("k3").value
            return Shown(
                {
                    f"share of {column} on the grid": share,
                    "KL that rounding alone gives": floor,
                    "KL by k3": value,
                },
                "error" if value < NOISE_MARGIN * floor else "warning",
                {"grid": grid},
            )
    return None


def clamped_values(m: Measured) -> Shown | None:
    share = m.numbers["clamped_share"]
    return Shown({"share at 10 or 20 nats": share}) if share >= MOST_AT_CLAMP else None


def ratio_mean(m: Measured) -> Shown | None:
    heavy = infinite_variance(m.tail("reference/policy"))
    for ratio in ("old/sampler", "reference/sampler"):
        mean = m.identity(ratio)
        if mean is None or not m.enough:
            continue
        unseen = heavy and mean.value < 1  # the missing mass is in the tail that was not seen
        if abs(mean.value - 1) >= RATIO_MARGIN and mean.clear_of(1.0) and not unseen:
            evidence: Evidence = {"mean": mean.value, "low": mean.low, "high": mean.high}
            return Shown(evidence, words={"ratio": ratio})
    return None


# Signs: what the KL term and the advantages do to the policy.


def advantage_sign(m: Measured) -> Shown | None:
    if "group_correlation" in m.numbers:
        if not groups.advantage_reversed(m):
            return None
        return Shown({"correlation within groups (one)": m.numbers["group_correlation"]})
    correlation = m.numbers.get("advantage_reward_correlation", 1.0)
    if correlation > NEGATIVE_CORRELATION or m.rollouts.sequences < FEWEST_SEQUENCES:
        return None
    return Shown({"correlation over sequences": correlation})


def advantage_opposed(m: Measured) -> Shown | None:
    """Not where the tokens of an update are other ones: then the response is near zero."""
    response = m.intervals.get("advantage_strength")
    if response is None or not m.enough or not response.clear_of(0.0):
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


# Samples, tails and clamps.


def train_inference_mismatch(m: Measured) -> Shown | None:
    """A truncated sampler that reports what it kept is one at any size: its ratio is one-signed."""
    gap = m.numbers.get("mismatch_kl", 0.0)
    above, below = (m.numbers.get(f"mismatch_{side}", 0.0) for side in ("above", "below"))
    truncated = below > MOST_BELOW and above < MOST_ABOVE
    if not (gap > LARGEST_MISMATCH_KL or (truncated and m.enough)):
        return None
    evidence: Evidence = {
        "KL of sampler to old policy": gap,
        "effective share of tokens": m.numbers["mismatch_ess"],
        "largest log-ratio": m.numbers["mismatch_largest"],
        "of the total KL of sampler to policy": m.numbers["total_kl"],
        "share of tokens with old clearly below sampler": below,
        "clearly above": above,
    }
    case = "truncated" if truncated else _which_engine(m)
    if case == "weights":
        evidence["KL in the first step"] = m.numbers["mismatch_kl_early"]
        evidence["in the last third of the steps"] = m.numbers["mismatch_kl_late"]
    if case == "raw":
        evidence["mean of sampler/old (one if old drew the tokens)"] = m.numbers[
            "sampler_over_old_mean"
        ]
    return Shown(evidence, None if gap > LARGEST_MISMATCH_KL else "warning", case=case)


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
    return "other"


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
    if same < SAME or max(repeated, behind) < MOST_REPEATED:
        return None
    evidence: Evidence = {"share of tokens with logp equal to old_logp": same}
    if repeated >= MOST_REPEATED:
        name = "share of rows whose completion stood there at an earlier step"
        return Shown(evidence | {name: repeated}, case="again")
    return Shown(evidence | {"share of tokens from earlier weights": behind}, "note", case="behind")


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


def _impossible(m: Measured) -> bool:
    share = m.numbers["impossible_share"]
    return share > MOST_IMPOSSIBLE and share * m.rollouts.tokens > FEWEST_IMPOSSIBLE - 0.5


def _last_kl(m: Measured) -> float:
    """KL by k3 in the last third of the steps."""
    third = len(m.by_step) // 3
    return sum(step.k3 for step in m.by_step[-third:]) / third if third else 0.0


def _may_be_loss(m: Measured, *estimators: str) -> bool:
    """May the term be one of these in the loss? Of an unknown term anything may be."""
    kl = m.settings.kl
    return kl is None or (kl.placement == "loss" and kl.estimator in estimators)
