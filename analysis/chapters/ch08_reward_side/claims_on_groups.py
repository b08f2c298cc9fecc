"""Claims on group statistics: baselines, normalisation, filtering, clipped spreads."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.func import grad

from analysis.chapters.ch08_reward_side.groups import (
    ADVANTAGES,
    NOISE_GROUPS,
    amplification_table,
    baseline_table,
    random_bandits,
    textbook_normalise,
)
from analysis.evidence.claims import EXACT, Finding, claim, judge, largest
from analysis.evidence.clip_slopes import clip_slopes
from analysis.evidence.policies import (
    all_groups,
    group_moments,
)
from analysis.evidence.recorded import difference, recorded
from kl_term.objectives.advantages import (
    group_centre,
    group_normalise,
)
from kl_term.objectives.difficulty import difficulty_weight
from kl_term.objectives.filtering import informative_groups, kept_fraction
from kl_term.objectives.lengths import length_penalty
from kl_term.objectives.losses import policy_loss


def binary_groups(size: int) -> Tensor:
    """[2^G, G]: every group of binary rewards."""
    return all_groups((0.0, 1.0), size).double()


def amplification(groups: Tensor, **bounds: float) -> Tensor:
    """Advantage over deviation from the group's mean."""
    return group_normalise(groups, eps=0.0, **bounds) / group_centre(groups)


@claim("S1-2")
def group_normalisation() -> Finding:
    """All binary groups of eight against the printed formula; bounds; token gradients."""
    size = 8
    groups = binary_groups(size)
    printed = textbook_normalise(groups, eps=0.0)
    defined = printed.isfinite().all(-1)
    ours = group_normalise(groups, eps=0.0)
    bounds = {ddof: group_normalise(groups, eps=0.0, ddof=ddof).abs().max() for ddof in (0, 1)}
    logp, mask = torch.zeros(size, 5).double(), torch.ones(size, 5, dtype=torch.bool)
    fixed = {"old_logp": logp, "advantages": ours[1], "mask": mask, "aggregation": "token_mean"}
    gradient = grad(lambda at: policy_loss(at, **fixed).loss)(logp)
    figures = {
        "formula_error": largest((printed - ours)[defined]),
        "largest_sum": largest(ours.sum(-1)),
        "bound_error": max(
            abs(bounds[0].item() - (size - 1) ** 0.5),
            abs(bounds[1].item() - (size - 1) / size**0.5),
        ),
        "broadcast_error": largest(gradient + ours[1][:, None] / mask.numel()),
        "undefined_groups": float((~defined).sum()),
        "ddof_ratio": (bounds[0] / bounds[1]).item(),
    }
    identities = max(list(figures.values())[:4]) < EXACT
    return Finding(judge(identities and figures["undefined_groups"] == 0, identities), figures)


@claim("S1-5")
def baseline_and_scale() -> Finding:
    """All V^G groups (V=4, G=2..4): factor, direction, variance and weight by difficulty."""
    table = baseline_table(*random_bandits(12, 4, seed=0), (2, 3, 4)).set_index("advantage")
    factors = {"minus the mean": 1 - 1 / table.group_size, "minus the others' mean": 1.0}
    errors = {}
    for name, factor in factors.items():
        found = table.assign(error=(table.factor - factor).abs()).loc[name]
        errors[name] = found[["error", "factor_spread", "rest"]].max(axis=None)
    hard, easy = difficulty_weight(torch.tensor([0.05, 0.5], dtype=torch.float64), 16)
    ratio, rewards = [], torch.tensor([1.0, 0.0], dtype=torch.float64)
    for success in (0.3, 0.9):
        logits = torch.tensor([success, 1 - success], dtype=torch.float64).log()
        names = ("minus the others' mean", "reward itself")
        others, plain = (
            group_moments(logits, rewards, 4, ADVANTAGES[name]).trace_var.item() for name in names
        )
        ratio.append(others / plain)
    figures = {
        "centre_factor_error": errors["minus the mean"],
        "leave_one_out_error": errors["minus the others' mean"],
        "normalised_cosine": math.cos(math.radians(table.angle["normalised"].max())),
        "variance_ratio_hard": ratio[0],
        "variance_ratio_easy": ratio[1],
        "weight_ratio": (hard / easy).item(),
    }
    baseline = max(figures["centre_factor_error"], figures["leave_one_out_error"]) < EXACT
    reduces_always = max(ratio) < 1
    only_scale = 1 - figures["normalised_cosine"] < EXACT and abs(hard / easy - 1) < 1e-3
    return Finding(judge(baseline and reduces_always and bool(only_scale), baseline), figures)


@claim("S3-3")
def clip_higher() -> Finding:
    """Gradient of the clipped loss at given ratios, forty steps on one sampled token, and
    recorded runs."""
    symmetric, higher = (clip_slopes(1.0, (1.0, 1.25), epsilon=high) for high in (0.2, 0.28))
    growth = {
        (p, high): _grown_probability(p, high) / p for p in (0.01, 0.9) for high in (0.2, 0.28)
    }
    figures = {
        "first_step_difference": abs(symmetric[0] - higher[0]),
        "gradient_symmetric": -symmetric[1],
        "gradient_higher": -higher[1],
        "rare_growth_symmetric": growth[0.01, 0.2],
        "rare_growth_higher": growth[0.01, 0.28],
        "likely_growth_difference": growth[0.9, 0.28] - growth[0.9, 0.2],
    }
    finals = recorded("clip_higher").finals
    for clip, metric in (("higher", "entropy"), ("higher", "accuracy"), ("wide", "entropy")):
        figures |= difference(finals, clip, "symmetric", metric).figures(f"{clip}_{metric}")
    helps_rare = figures["rare_growth_higher"] - figures["rare_growth_symmetric"] > 0.01
    at_once = figures["first_step_difference"] > EXACT
    return Finding(judge(helps_rare and at_once, helps_rare), figures)


@claim("S3-4")
def dynamic_sampling() -> Finding:
    """Kept fraction by enumerating all groups; the advantage of the others with and without eps;
    and recorded runs."""
    errors, printed = [], {0.0: [], 1e-4: []}
    for size in (2, 4, 8):
        groups = binary_groups(size)
        kept = informative_groups(groups)
        for p in (0.1, 0.5, 0.9):
            chance = (groups * p + (1 - groups) * (1 - p)).prod(-1)
            formula = kept_fraction(torch.tensor(p, dtype=torch.float64), size)
            errors.append(largest(chance @ kept.double() - formula))
        for eps, advantages in printed.items():
            advantages += textbook_normalise(groups[~kept], eps=eps).flatten().tolist()
    figures = {
        "fraction_error": max(errors),
        "undefined_share_without_eps": sum(map(math.isnan, printed[0.0])) / len(printed[0.0]),
        "advantage_with_eps": max(map(abs, printed[1e-4])),
        "kept_at_p10_of_8": kept_fraction(torch.tensor(0.1, dtype=torch.float64), 8).item(),
    }
    finals = recorded("near_ties").finals
    dropped = difference(finals, "drop_uniform", "group_std", "accuracy")
    noisy = difference(finals, "drop_uniform_noisy", "group_std_noisy", "accuracy")
    left_out = difference(finals, "group_std", "drop_uniform", "used_fraction")
    figures |= dropped.figures("trained_gain") | noisy.figures("trained_gain_noisy")
    figures |= {"trained_share_left_out": left_out.mean}
    undefined_without = figures["undefined_share_without_eps"] == 1
    undefined_with = figures["advantage_with_eps"] != 0
    formula_right = figures["fraction_error"] < EXACT
    return Finding(
        judge(undefined_without and undefined_with, undefined_without and formula_right), figures
    )


@claim("S3-5")
def length_price() -> Finding:
    """Normalised advantages of a long answer, by the price of a token and the group; and
    recorded runs."""
    lengths = torch.tensor([400.0, 100.0, 100.0, 400.0], dtype=torch.float64)
    all_right = torch.ones(4, dtype=torch.float64)
    mixed = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)

    def of_long(rewards: Tensor, price: float, sizes: Tensor = lengths) -> float:
        return group_normalise(length_penalty(rewards, sizes, weight=price), eps=0.0)[0].item()

    figures = {
        "all_right_cheap": of_long(all_right, 1e-6),
        "all_right_dear": of_long(all_right, 1e-1),
        "equal_lengths": of_long(all_right, 1e-2, torch.full_like(lengths, 250.0)),
        "long_right_cheap": of_long(mixed, 1e-6),
        "long_right_dear": of_long(mixed, 1e-2),
    }
    finals = recorded("length_growth").finals
    shorter = difference(finals, "linear_price", "grpo", "length")
    figures |= shorter.figures("trained_length")
    figures |= difference(finals, "linear_price", "grpo", "accuracy").figures("trained_accuracy")
    discourages = figures["all_right_cheap"] < 0 and figures["long_right_dear"] < 0
    discourages = discourages and shorter.below
    price_matters = abs(figures["all_right_cheap"] - figures["all_right_dear"]) > 1e-6
    always = price_matters and figures["equal_lengths"] < 0 and figures["long_right_cheap"] < 0
    return Finding(judge(always, discourages), figures)


@claim("S4-31")
def noise_example() -> Finding:
    """The example of the seed under both degrees of freedom, with eps, and in float32."""
    rewards, printed = torch.tensor(NOISE_GROUPS["rounding"], dtype=torch.float32), 0.8660
    table = amplification_table().set_index("group").loc["rounding"]
    figures = {
        "ddof1": table["std"],
        "by_hand": 1e-5 / (4e-10 / 3) ** 0.5,
        "ddof0": table["std, ddof 0"],
        "with_eps": table["std + 1e-4"],
        "float32": textbook_normalise(rewards, eps=0.0)[1].item(),
    }
    agree = [abs(figures[k] - printed) < 5e-5 for k in ("ddof1", "ddof0", "with_eps")]
    return Finding(judge(all(agree), agree[0]), figures)


@claim("S4-32")
def clipped_std() -> Finding:
    """Largest amplification, advantage over deviation, with and without a lower bound; and
    recorded runs."""
    noise = torch.logspace(-9, 0, 19, dtype=torch.float64)
    rewards = noise[:, None] * torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    clipped = {"std_min": 0.1, "std_max": 1.0}
    figures = {
        "bound_at_min": largest(amplification(rewards, **clipped)),
        "unbounded_at_zero": largest(amplification(rewards, std_min=0.0, std_max=1.0)),
        "largest_advantage_at_max": largest(group_normalise(100 * rewards[-1], eps=0.0, **clipped)),
    }
    finals = recorded("near_ties").finals
    gain = difference(finals, "std_min_noisy", "group_std_noisy", "accuracy")
    figures |= gain.figures("trained_gain")
    bounded = figures["bound_at_min"] <= 10 * (1 + 1e-12)
    bounded_at_zero = figures["unbounded_at_zero"] <= 10
    return Finding(judge(bounded and bounded_at_zero, bounded), figures)


@claim("S4-33")
def variance_of_bounded_rewards() -> Finding:
    """Extremes of the variance on [0, 1]: it is convex, so they sit at the binary groups."""
    population, sample = [], []
    for size in range(2, 13):
        right = torch.arange(size + 1, dtype=torch.float64)[:, None]
        groups = (torch.arange(size) < right).to(torch.float64)  # one of each number of right
        population.append(groups.var(-1, correction=0).max())
        sample.append(groups.var(-1, correction=1).max())
    generator = torch.Generator().manual_seed(0)
    interior = torch.rand(20_000, 2, generator=generator, dtype=torch.float64)
    least = min(amplification(binary_groups(size)[1:-1]).min() for size in (2, 3, 8))
    figures = {
        "population_max": torch.stack(population).max().item(),
        "sample_max": torch.stack(sample).max().item(),
        "sample_max_of_8": sample[6].item(),
        "interior_max": interior.var(-1, correction=1).max().item(),
        "least_amplification": least.item(),
    }
    below_one = max(figures["sample_max"], figures["population_max"], figures["interior_max"]) < 1
    amplifies = figures["least_amplification"] > 1
    return Finding(judge(below_one and amplifies, below_one), figures)


@claim("S4-xb")
def smaller_variance_larger_amplification() -> Finding:
    """Amplification of one shape of group at shrinking scales, without eps and with std_min."""
    shape = torch.tensor([0.0, 1.0, 0.2, 0.7], dtype=torch.float64)
    groups = torch.logspace(0, -6, 13, dtype=torch.float64)[:, None] * shape
    plain = amplification(groups).mean(-1)
    floored = amplification(groups, std_min=0.1).mean(-1)
    figures = {
        "amplification_times_std_error": largest(plain * groups.std(-1) - 1),
        "least_growth": (plain[1:] / plain[:-1]).min().item(),
        "least_growth_with_floor": (floored[1:] / floored[:-1]).min().item(),
    }
    grows = figures["least_growth"] > 1 and figures["amplification_times_std_error"] < 1e-8
    return Finding(judge(grows, False), figures)


def _grown_probability(start: float, epsilon_high: float) -> float:
    """Probability of one good token after forty ascent steps on the same sample."""
    logits = torch.tensor([start, 1 - start], dtype=torch.float64).log()
    old = logits.log_softmax(-1)[:1]
    fixed = {"advantages": torch.ones(1).double(), "mask": torch.ones(1, dtype=torch.bool)}
    fixed |= {"old_logp": old, "epsilon_high": epsilon_high}
    slope = grad(lambda at: policy_loss(at.log_softmax(-1)[:1], **fixed).loss)
    for _ in range(40):
        logits = logits - 0.02 * slope(logits)
    return logits.softmax(-1)[0].item()
