"""Columns that are not what they say: masks, shifts, other tokens, roundings and clamps."""

from __future__ import annotations

import math

from kl_term.diagnosis import integrity
from kl_term.diagnosis.schema import Evidence, Measured, Shown
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
#: The slope of -log p on the entropy is one, and zero where they are of other states.
LARGEST_FOREIGN_SLOPE = 0.5
#: Log-probs of other tokens make the mean ratio explode, a policy that is far away does not: its
#: mean is at most one.
UNRELATED_RATIO = 1.5
#: The first updates turn no certain token into one of probability below 1/e, and not three at once.
MOST_MASKED = 1e-3
#: The bound is on a mean; fewer early ends have too noisy a mean to hold against it.
FEWEST_ENDS = 20
#: Text that ends in a loop, cut off, ends so now and then; a token that ends sequences never does.
MOST_TWICE = 0.5
#: Nats beyond the bound: tokens that end a sequence for another reason than being its end token
#: (a stop string, a cut) have the surprise of any token.
END_MARGIN = 3.0
#: Equal but for rounding.
SAME = 0.999
#: Random float32 log-probs fall on a bfloat16 grid once in a hundred; nine in ten is a type.
GRID_SHARE = 0.9
#: Rounding adds half its variance to k3; with less than ten times that, the KL is mostly rounding.
NOISE_MARGIN = 10.0
#: A log-ratio within 1e-4 of 10 or 20 has probability of order 1e-5 in any smooth distribution.
MOST_AT_CLAMP = 1e-3
#: The mean ratio is one exactly, so a tenth is no sampling noise where it is four standard errors
#: away; smaller offsets come from top-p and low-precision inference.
RATIO_MARGIN = 0.1
#: With more than half of the sequences silent, the batch trains mostly on the KL; with all, on
#: nothing else.
MOST_SILENT, ALL_SILENT = 0.5, 0.99


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


def other_base(m: Measured) -> Shown | None:
    """Columns whose quotient is that of two bases, and which are one policy's to one base."""
    found = {
        name: base for name in ("old", "ref", "sampler") if (base := m.numbers.get(f"base_{name}"))
    }
    if not found or len({abs(base) for base in found.values()}) > 1 or not m.enough:
        return None
    held = ["ref"] + ["old"] * m.rollouts.has_old_logp
    held += [] if m.rollouts.sampler_logp is None else ["sampler"]
    natural = [name for name, base in found.items() if base < 0]
    if natural:  # then logp is to that base, and what agrees with it
        off = ["logp", *(f"{name}_logp" for name in held if name not in natural)]
    else:
        off = [f"{name}_logp" for name in found]
    name = next(iter(found))
    evidence: Evidence = {
        "mean squared log-ratio as dumped": m.numbers[f"base_apart_{name}"],
        "with all to one base": m.numbers[f"base_left_{name}"],
    }
    words = {"columns": " and ".join(off), "base": f"{abs(found[name]):g}"}
    return Shown(evidence, words=words)


def other_tokens(m: Measured) -> Shown | None:
    for name in ("ref", "old", "sampler"):
        aligned = m.numbers.get(f"aligned_{name}", 1.0)
        ratio = m.numbers.get(f"ratio_{name}", 1.0)
        if aligned < UNRELATED and ratio > UNRELATED_RATIO and misaligned(m) is None:
            return Shown(
                {"correlation with logp": aligned, "mean ratio to logp": ratio},
                words={"column": name},
            )
    return _entropy_of_others(m)


def _entropy_of_others(m: Measured) -> Shown | None:
    """Not where the mean of -log p is off too: then the sampler is another."""
    slope, gap = m.intervals.get("entropy_slope"), m.intervals.get("surprise_gap")
    if slope is None or gap is None or not m.enough or gap.clear_of(0.0):
        return None
    if slope.high > LARGEST_FOREIGN_SLOPE or not slope.clear_of(1.0):
        return None
    if misaligned(m) is not None:
        return None
    return Shown(
        {"slope of -log p on the entropy (one)": slope.value, "upper end": slope.high},
        words={"column": "policy's own"},
    )


def masked_when_scored(m: Measured) -> Shown | None:
    share, count = (m.numbers[f"masked_when_scored_{what}"] for what in ("share", "tokens"))
    if share < MOST_MASKED or count < FEWEST_IMPOSSIBLE:
        return None
    return Shown({"share with log-prob 0 in one column and below -1 in another": share})


def unsampled_end(m: Measured) -> Shown | None:
    """Nothing is sampled behind an end, so no end stands before another."""
    if m.numbers.get("early_ends", 0.0) < FEWEST_ENDS:
        return None
    twice, alike = (m.numbers.get(f"ends_{name}_share", 0.0) for name in ("twice", "alike"))
    if min(twice, alike) > MOST_TWICE:
        return Shown({"share of sequences whose last two tokens are the usual end token": twice})
    surprise, bound = (m.numbers[f"end_{name}"] for name in ("surprise", "surprise_bound"))
    if surprise <= bound + END_MARGIN:
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


def _impossible(m: Measured) -> bool:
    share = m.numbers["impossible_share"]
    return share > MOST_IMPOSSIBLE and share * m.rollouts.tokens > FEWEST_IMPOSSIBLE - 0.5
