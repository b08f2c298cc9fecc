"""Claims about what the group does to the reward: baseline, division, length, filtering, clip."""

from __future__ import annotations

import itertools

import torch

from analysis.experiments.chapters import advantages as study
from analysis.experiments.claims import Finding, decides, settle
from analysis.experiments.claims.recorded import difference, recorded
from analysis.kl.enumeration import cosine
from analysis.objectives.advantages import group_centre, group_normalise, leave_one_out
from analysis.objectives.difficulty import difficulty_weight
from analysis.objectives.filtering import informative_groups, kept_fraction
from analysis.objectives.lengths import length_penalty
from analysis.objectives.losses import policy_loss

EXACT = 1e-12


def binary_groups(size: int) -> torch.Tensor:
    """[2^G, G]: every group of binary rewards."""
    return torch.tensor(list(itertools.product((0.0, 1.0), repeat=size)), dtype=torch.float64)


@decides("S1-2")
def group_normalisation() -> Finding:
    """All binary groups of eight against the printed formula; bounds; token gradients."""
    size = 8
    groups = binary_groups(size)
    printed = study.textbook_normalise(groups, eps=0.0)
    defined = printed.isfinite().all(-1)
    ours = group_normalise(groups, eps=0.0)
    bounds = {ddof: group_normalise(groups, eps=0.0, ddof=ddof).abs().max() for ddof in (0, 1)}
    logp = torch.zeros(size, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(size, 5, dtype=torch.bool)
    loss = policy_loss(
        logp, old_logp=logp.detach(), advantages=ours[1], mask=mask, aggregation="token_mean"
    ).loss
    (gradient,) = torch.autograd.grad(loss, logp)
    figures = {
        "formula_error": (printed - ours)[defined].abs().max().item(),
        "largest_sum": ours.sum(-1).abs().max().item(),
        "bound_error": max(
            abs(bounds[0].item() - (size - 1) ** 0.5),
            abs(bounds[1].item() - (size - 1) / size**0.5),
        ),
        "broadcast_error": (gradient + ours[1][:, None] / mask.numel()).abs().max().item(),
        "undefined_groups": float((~defined).sum()),
        "ddof_ratio": (bounds[0] / bounds[1]).item(),
    }
    identities = max(list(figures.values())[:4]) < EXACT
    return Finding(settle(identities and figures["undefined_groups"] == 0, identities), figures)


@decides("S1-5")
def baseline_and_scale() -> Finding:
    """All V^G groups (V=4, G=2..4): factor, direction, variance and weight by difficulty."""
    logits, rewards = study.random_bandits(12, 4, seed=0)
    exact = study.true_gradient(logits, rewards)
    centred, others, angle = [], [], []
    for size in (2, 3, 4):
        for z, r, g in zip(logits, rewards, exact, strict=True):
            mean = study.group_moments(z, r, size, group_centre).mean
            centred.append((mean - (size - 1) / size * g).abs().max())
            others.append((study.group_moments(z, r, size, leave_one_out).mean - g).abs().max())
            angle.append(cosine(study.group_moments(z, r, size, group_normalise).mean, g))
    hard, easy = difficulty_weight(torch.tensor([0.05, 0.5], dtype=torch.float64), 16)
    ratio = study.variance_curves(torch.tensor([0.3, 0.9], dtype=torch.float64), 4).ratio
    figures = {
        "centre_factor_error": torch.stack(centred).max().item(),
        "leave_one_out_error": torch.stack(others).max().item(),
        "normalised_cosine": torch.stack(angle).min().item(),
        "variance_ratio_hard": ratio[0],
        "variance_ratio_easy": ratio[1],
        "weight_ratio": (hard / easy).item(),
    }
    baseline = max(figures["centre_factor_error"], figures["leave_one_out_error"]) < EXACT
    reduces_always = max(ratio) < 1
    only_scale = 1 - figures["normalised_cosine"] < EXACT and abs(hard / easy - 1) < 1e-3
    return Finding(settle(baseline and reduces_always and bool(only_scale), baseline), figures)


@decides("S3-3")
def clip_higher() -> Finding:
    """Gradient of the clipped loss at given ratios, and forty steps on one sampled token.

    Recorded runs say what the wider clip did to entropy and to accuracy.
    """
    ratios = torch.tensor([1.0, 1.25, 1.3], dtype=torch.float64)
    symmetric, higher = (_ratio_gradient(ratios, high) for high in (0.2, 0.28))
    growth = {
        (p, high): _grown_probability(p, high) / p for p in (0.01, 0.9) for high in (0.2, 0.28)
    }
    figures = {
        "first_step_difference": (symmetric - higher)[0].abs().item(),
        "gradient_symmetric": symmetric[1].item(),
        "gradient_higher": higher[1].item(),
        "rare_growth_symmetric": growth[0.01, 0.2],
        "rare_growth_higher": growth[0.01, 0.28],
        "likely_growth_difference": growth[0.9, 0.28] - growth[0.9, 0.2],
    }
    finals = recorded("clip_higher").finals
    for clip, metric in (("higher", "entropy"), ("higher", "accuracy"), ("wide", "entropy")):
        figures |= difference(finals, clip, "symmetric", metric).figures(f"{clip}_{metric}")
    helps_rare = figures["rare_growth_higher"] - figures["rare_growth_symmetric"] > 0.01
    at_once = figures["first_step_difference"] > EXACT
    return Finding(settle(helps_rare and at_once, helps_rare), figures)


@decides("S3-4")
def dynamic_sampling() -> Finding:
    """Kept fraction by enumerating all groups; the advantage of the others with and without eps.

    Recorded runs say what leaving them out did to accuracy, and to what share of the tokens.
    """
    error, with_eps, undefined, total = 0.0, 0.0, 0, 0
    for size in (2, 4, 8):
        groups = binary_groups(size)
        kept = informative_groups(groups)
        for p in (0.1, 0.5, 0.9):
            chance = (groups * p + (1 - groups) * (1 - p)).prod(-1)
            formula = kept_fraction(torch.tensor(p, dtype=torch.float64), size)
            error = max(error, (chance @ kept.to(chance.dtype) - formula).abs().item())
        printed = study.textbook_normalise(groups[~kept], eps=0.0)
        undefined += int((~printed.isfinite()).all(-1).sum())
        total += len(printed)
        with_eps = max(with_eps, study.textbook_normalise(groups[~kept], eps=1e-4).abs().max())
    figures = {
        "fraction_error": error,
        "undefined_share_without_eps": undefined / total,
        "advantage_with_eps": float(with_eps),
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
        settle(undefined_without and undefined_with, undefined_without and formula_right), figures
    )


@decides("S3-5")
def length_price() -> Finding:
    """Normalised advantages of a long answer, by the price of a token and the group around it.

    Recorded runs say what a price did to length and to accuracy.
    """
    lengths = torch.tensor([400.0, 100.0, 100.0, 400.0], dtype=torch.float64)
    all_right = torch.ones(4, dtype=torch.float64)
    mixed = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)

    def of_long(rewards: torch.Tensor, price: float, sizes: torch.Tensor = lengths) -> float:
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
    return Finding(settle(always, discourages), figures)


@decides("S4-31")
def noise_example() -> Finding:
    """The example of the seed under both degrees of freedom, with eps, and in float32."""
    rewards = study.noise_groups()["rounding"]
    printed = 0.8660
    by_hand = 1e-5 / (4e-10 / 3) ** 0.5
    figures = {
        "ddof1": group_normalise(rewards, eps=0.0)[1].item(),
        "by_hand": by_hand,
        "ddof0": group_normalise(rewards, eps=0.0, ddof=0)[1].item(),
        "with_eps": group_normalise(rewards)[1].item(),
        "float32": study.textbook_normalise(rewards.float(), eps=0.0)[1].item(),
    }
    agree = [abs(figures[k] - printed) < 5e-5 for k in ("ddof1", "ddof0", "with_eps")]
    return Finding(settle(all(agree), agree[0]), figures)


@decides("S4-32")
def clipped_std() -> Finding:
    """Largest amplification, advantage over deviation, with and without a lower bound.

    Recorded runs say what the lower bound was worth under noisy rewards.
    """
    noise = torch.logspace(-9, 0, 19, dtype=torch.float64)
    rewards = noise[:, None] * torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=torch.float64)

    def amplification(**bounds: float) -> float:
        advantages = group_normalise(rewards, eps=0.0, **bounds)
        return (advantages / group_centre(rewards)).abs().max().item()

    figures = {
        "bound_at_min": amplification(std_min=0.1, std_max=1.0),
        "unbounded_at_zero": amplification(std_min=0.0, std_max=1.0),
        "largest_advantage_at_max": group_normalise(
            100 * rewards[-1], eps=0.0, std_min=0.1, std_max=1.0
        )
        .max()
        .item(),
    }
    finals = recorded("near_ties").finals
    gain = difference(finals, "std_min_noisy", "group_std_noisy", "accuracy")
    figures |= gain.figures("trained_gain")
    bounded = figures["bound_at_min"] <= 10 * (1 + 1e-12)
    bounded_at_zero = figures["unbounded_at_zero"] <= 10
    return Finding(settle(bounded and bounded_at_zero, bounded), figures)


@decides("S4-33")
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
    amplification = [
        (group_normalise(groups, eps=0.0) / group_centre(groups)).min()
        for groups in (binary_groups(size)[1:-1] for size in (2, 3, 8))
    ]
    figures = {
        "population_max": torch.stack(population).max().item(),
        "sample_max": torch.stack(sample).max().item(),
        "sample_max_of_8": sample[6].item(),
        "interior_max": interior.var(-1, correction=1).max().item(),
        "least_amplification": torch.stack(amplification).min().item(),
    }
    below_one = max(figures["sample_max"], figures["population_max"], figures["interior_max"]) < 1
    amplifies = figures["least_amplification"] > 1
    return Finding(settle(below_one and amplifies, below_one), figures)


@decides("S4-xb")
def smaller_variance_larger_amplification() -> Finding:
    """Amplification of one shape of group at shrinking scales, without eps and with std_min."""
    shape = torch.tensor([0.0, 1.0, 0.2, 0.7], dtype=torch.float64)
    groups = torch.logspace(0, -6, 13, dtype=torch.float64)[:, None] * shape

    def amplification(**bounds: float) -> torch.Tensor:
        return (group_normalise(groups, eps=0.0, **bounds) / group_centre(groups)).mean(-1)

    plain, floored = amplification(), amplification(std_min=0.1)
    product = plain * groups.std(-1)
    figures = {
        "amplification_times_std_error": (product - 1).abs().max().item(),
        "least_growth": (plain[1:] / plain[:-1]).min().item(),
        "least_growth_with_floor": (floored[1:] / floored[:-1]).min().item(),
    }
    grows = figures["least_growth"] > 1 and figures["amplification_times_std_error"] < 1e-8
    return Finding(settle(grows, False), figures)


def _ratio_gradient(ratios: torch.Tensor, epsilon_high: float) -> torch.Tensor:
    """Gradient of the loss by log-probs at given ratios, advantage one."""
    logp = ratios.log().requires_grad_(True)
    loss = policy_loss(
        logp,
        old_logp=torch.zeros_like(logp),
        advantages=torch.ones_like(logp),
        mask=torch.ones_like(logp, dtype=torch.bool),
        epsilon_high=epsilon_high,
        aggregation="seq_mean_token_sum",
    ).loss
    return torch.autograd.grad(loss, logp)[0]


def _grown_probability(start: float, epsilon_high: float) -> float:
    """Probability of one good token after forty ascent steps on the same sample."""
    logits = torch.tensor([start, 1 - start], dtype=torch.float64).log()
    old = logits.log_softmax(-1)[:1]
    counted, advantage = torch.ones(1, dtype=torch.bool), torch.ones(1, dtype=torch.float64)
    for _ in range(40):
        leaf = logits.clone().requires_grad_(True)
        logp = leaf.log_softmax(-1)[:1]
        loss = policy_loss(
            logp, old_logp=old, advantages=advantage, mask=counted, epsilon_high=epsilon_high
        ).loss
        logits = logits - 0.02 * torch.autograd.grad(loss, leaf)[0]
    return logits.softmax(-1)[0].item()
