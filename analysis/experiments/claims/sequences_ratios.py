"""Claims on importance ratios along a sequence: products, first orders, masks and mismatch."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.experiments.chapters.gradients import drifted_logits, random_tables
from analysis.experiments.chapters.sequence_ratios import (
    mismatch_gradients,
    one_recurrent_state,
    order_curves,
    random_returns,
    slope,
)
from analysis.experiments.chapters.sequences import EXACT, SPREAD, flat_error, quantile
from analysis.experiments.claims import Finding, decides, settle
from analysis.experiments.claims.recorded import difference, recorded
from analysis.kl.credit import credit_moments
from analysis.kl.divergences import chi_square
from analysis.kl.enumeration import cosine
from analysis.kl.products import (
    chi_square_bounds,
    geometric_spread,
    markov_product_variance,
    product_variance,
    sequence_ratio_spread,
)
from analysis.kl.ratio_objectives import (
    ratio_objective_gradient,
)
from analysis.kl.sequences import (
    Sequences,
    enumerate_sequences,
    sequence_probability,
    token_logp,
)
from analysis.kl.truncation import keep_top, masked_logits

SIZES = (0.005, 0.01, 0.02, 0.04)  #: steps over which an order is measured
ORDER = 0.1  #: how near a measured slope must come to a whole order


def _near(value: float, target: float) -> bool:
    return abs(value - target) < ORDER


@decides("S3-21")
def product_variance_grows() -> Finding:
    """Variance of products of ratios: in closed form, listed, and where one state alone changes,
    met once or again and again.

    The closed form multiplies second moments; the referee lists every sequence.
    """
    generator = torch.Generator().manual_seed(71)
    base, direction = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    pair = (base + 0.3 * direction, base)  # policy, sampler
    chi2 = chi_square(pair[1], pair[0])
    iid, first_only = [], []
    for length in (1, 2, 3, 4, 5):
        sequences = enumerate_sequences(3, length)
        logits, old = (row.expand(sequences.num_states, 3) for row in pair)
        listed = sequence_ratio_spread(logits, old, sequences).var
        iid.append((listed / product_variance(chi2, length) - 1).abs().item())
        moved = old.clone()
        moved[0] = pair[0]
        first_only.append(sequence_ratio_spread(moved, old, sequences).var.item())
    tree = enumerate_sequences(3, 5)
    logits, old = torch.randn(2, tree.num_states, 3, generator=generator, dtype=torch.float64)
    low, high = chi_square_bounds(logits, old, 5)
    listed = sequence_ratio_spread(logits, old, tree).var
    # mean log of exp(sum of rho - 1) over the product of rho, for a thousand tokens a little apart
    near, old = (base + 0.03 * direction).softmax(-1), base.softmax(-1)
    misprint = 1000 * (old * (near / old - 1 - (near / old).log())).sum()
    figures = {
        "iid_error": max(iid),
        "iid_variance_5": product_variance(chi2, 5).item(),
        "iid_variance_50": product_variance(chi2, 50).item(),
        "one_state_growth": abs(first_only[-1] / first_only[0] - 1),
        "one_of_ten_100": markov_product_variance(*one_recurrent_state(10, 0.4), 100).item(),
        "outside_bounds": float(not low <= listed <= high),
        "delta_log_gap_1000": misprint.item(),
    }
    exponential = figures["iid_error"] < EXACT and figures["outside_bounds"] == 0
    always = figures["one_state_growth"] > 1 and figures["delta_log_gap_1000"] < EXACT
    return Finding(settle(exponential and always, exponential), figures)


@decides("S3-23")
def gspo_weight() -> Finding:
    """GSPO's gradient identity by autograd; mean and spread of its weight beside the product's; and
    recorded runs against GRPO, in GRPO's clip range and in a narrower one."""
    sequences = enumerate_sequences(3, 4, eos=2)
    tables = random_tables(sequences, 3, 1, spread=SPREAD, seed=81)
    old = tables.logits[0]
    logits = old + 0.5 * tables.ref_logits[0]
    leaf = logits.clone().requires_grad_(True)
    lengths = sequences.mask.sum(-1)
    log_ratio = token_logp(leaf, sequences).sum(-1) - token_logp(old, sequences).sum(-1)
    weights = (log_ratio / lengths).exp()
    identity = []
    for row in range(0, len(lengths), 3):
        (by_autograd,) = torch.autograd.grad(weights[row], leaf, retain_graph=True)
        credit = (weights / lengths).detach()[:, None] * torch.ones_like(sequences.mask).double()
        only = torch.where((torch.arange(len(lengths)) == row)[:, None], credit, 0.0)
        by_hand = credit_moments(logits, sequences, only, logits).mean
        by_hand = by_hand / sequence_probability(logits, sequences)[row]
        identity.append(flat_error(by_hand, by_autograd))
    cosines = []
    for seed, (sampler, direction) in enumerate(
        zip(*random_tables(sequences, 3, 8, spread=SPREAD, seed=83), strict=True)
    ):
        moved, returns = sampler + 0.2 * direction, random_returns(sequences, seed=seed)
        returns = returns - sequence_probability(sampler, sequences) @ returns
        exact, gspo = (
            ratio_objective_gradient(moved, sampler, sequences, returns, objective=name).flatten()
            for name in ("sequence", "geometric")
        )
        cosines.append(cosine(gspo, exact).item())
    pair = old[:2]
    short, long = (geometric_spread(pair[1] + 0.3 * pair[0], pair[1], n) for n in (10, 1000))
    chi2 = chi_square(pair[1], pair[1] + 0.3 * pair[0])
    figures = {
        "identity_error": max(identity),
        "std_10": short.var.sqrt().item(),
        "std_1000": long.var.sqrt().item(),
        "product_std_1000": product_variance(chi2, 1000).sqrt().item(),
        "mean_1000": long.mean.item(),
        "gradient_cosine": quantile(cosines),
    }
    finals = recorded("objectives").finals
    for arm in ("gspo", "gspo_narrow"):
        figures |= difference(finals, arm, "grpo", "accuracy").figures(f"trained_{arm}")
    identity_and_spread = (
        figures["identity_error"] < EXACT
        and figures["std_1000"] < figures["std_10"] < figures["product_std_1000"]
    )
    comparable = abs(figures["std_10"] / figures["std_1000"] - 1) < ORDER
    return Finding(settle(identity_and_spread and comparable, identity_and_spread), figures)


@decides("S3-33")
def keep_sampling_mask() -> Finding:
    """Mean ratios and gradients under a top-p sampler, with and without its mask on the policy.

    The referee is autograd through the mean return of the masked, and of the full, policy; recorded
    runs say what the mask did to the policy's own accuracy.
    """
    generator = torch.Generator().manual_seed(91)
    old, direction, returns = torch.randn(3, 40, 16, generator=generator, dtype=torch.float64)
    old, logits = 1.5 * old, 1.5 * old + 0.3 * direction
    keep = keep_top(old, top_p=0.9)
    sampler = masked_logits(old, keep).softmax(-1)
    masked = masked_logits(logits, keep)

    def estimated(policy_logits: Tensor) -> tuple[Tensor, Tensor]:
        policy = policy_logits.softmax(-1)
        ratio = torch.where(keep, policy / sampler, 0.0)
        weighted = sampler * ratio * returns
        return (sampler * ratio).sum(-1), weighted - policy * weighted.sum(-1, keepdim=True)

    def exact(policy_logits: Tensor) -> Tensor:
        leaf = policy_logits.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad((leaf.softmax(-1) * returns).sum(), leaf)
        return gradient

    masked_mean, masked_gradient = estimated(masked)
    plain_mean, plain_gradient = estimated(logits)
    figures = {
        "masked_mean_error": (masked_mean - 1).abs().max().item(),
        "masked_gradient_error": flat_error(masked_gradient, exact(masked)),
        "plain_mean": plain_mean.mean().item(),
        "plain_mean_100_tokens": plain_mean.log().mean().mul(100).exp().item(),
        "plain_gradient_error": flat_error(plain_gradient, exact(logits)),
        "full_policy_error": flat_error(masked_gradient, exact(logits)),
    }
    finals = recorded("mismatch").finals
    pair = ("top_p_keep_mask", "top_p_uncorrected", "own_accuracy")
    figures |= difference(finals, *pair).figures("trained_gain")
    unbiased = max(figures["masked_mean_error"], figures["masked_gradient_error"]) < EXACT
    return Finding(settle(unbiased and figures["full_policy_error"] < EXACT, unbiased), figures)


@decides("S3-34")
def token_objective_is_first_order() -> Finding:
    """Measured orders of the token objective's error: slopes over steps of four sizes.

    The route is the sum over sequences of the product of ratios, and autograd through it.
    """
    sequences = enumerate_sequences(3, 4, eos=2)
    tables = random_tables(sequences, 3, 8, spread=SPREAD, seed=101)
    curves = order_curves(tables.logits, sequences, SIZES, seed=102)
    linear = curves[curves.objective == "linear"]
    mean = curves[curves.objective == "token_mean"]
    at_sampler = [
        ratio_objective_gradient(old, old, sequences, returns, objective=name)
        for old in tables.logits[:1]
        for returns in (random_returns(sequences, seed=103),)
        for name in ("sequence", "token", "token_mean")
    ]
    figures = {
        "gradient_error_at_sampler": flat_error(at_sampler[1], at_sampler[0]),
        "value_order": slope(linear["size"], linear.change),
        "gradient_order": slope(linear["size"], linear.gradient),
        "length_mean_error": flat_error(at_sampler[2], at_sampler[0]),
        "length_mean_order": slope(mean["size"], mean.gradient),
        "error_3_tokens": _gradient_error(3),
        "error_8_tokens": _gradient_error(8),
    }
    first_order = (
        figures["gradient_error_at_sampler"] < EXACT
        and _near(figures["value_order"], 2)
        and _near(figures["gradient_order"], 1)
    )
    everywhere = figures["length_mean_error"] < EXACT
    return Finding(settle(first_order and everywhere, first_order), figures)


def _gradient_error(length: int, size: float = 0.2) -> float:
    """Median relative error of the token gradient at one step size, by length."""
    sequences = enumerate_sequences(2, length)
    tables = random_tables(sequences, 2, 6, spread=SPREAD, seed=104)
    curves = order_curves(tables.logits, sequences, (size,), seed=105)
    return curves[curves.objective == "linear"].gradient.item()


@decides("S3-35")
def two_factors_of_the_ratio() -> Finding:
    """Each factor alone, the first one dropped, and both cancelling, on enumerated sequences."""
    sequences = enumerate_sequences(3, 4, eos=2)
    tables = random_tables(sequences, 3, 8, spread=SPREAD, seed=111)
    names = ("gap", "stale", "dropped", "cancelled", "identity")
    errors: dict[str, list[float]] = {name: [] for name in names}
    for size in SIZES:
        found: dict[str, list[float]] = {name: [] for name in names}
        for seed, (old, direction) in enumerate(zip(*tables, strict=True)):
            returns = random_returns(sequences, seed=seed)
            moved = drifted_logits(old, torch.tensor([size]), seed=seed)[0]
            sampler = old + size * direction
            found["gap"].append(_token_error(old, old, sampler, sequences, returns))
            found["stale"].append(_token_error(moved, old, old, sequences, returns))
            found["cancelled"].append(_token_error(sampler, old, sampler, sequences, returns))
            gradients = mismatch_gradients(old, old, sampler, sequences, returns)
            exact = gradients["both factors, product"]
            found["dropped"].append(flat_error(gradients["first factor dropped"], exact))
            logp, old_logp, sampler_logp = (
                token_logp(x, sequences).sum(-1) for x in (moved, old, sampler)
            )
            product = (old_logp - sampler_logp).exp() * (logp - old_logp).exp()
            ratio = (logp - sampler_logp).exp()
            found["identity"].append((product / ratio - 1).abs().max().item())
        for name, values in found.items():
            errors[name].append(quantile(values))
    figures = {
        "identity_error": max(errors["identity"]),
        "gap_order": slope(SIZES, errors["gap"]),
        "stale_order": slope(SIZES, errors["stale"]),
        "dropped_order": slope(SIZES, errors["dropped"]),
        "dropped_over_kept": errors["dropped"][-1] / errors["gap"][-1],
        "cancelled_error": max(errors["cancelled"]),
    }
    identity = figures["identity_error"] < EXACT
    each_breaks = all(_near(figures[f"{name}_order"], 1) for name in ("gap", "stale"))
    whatever_the_other = figures["cancelled_error"] > EXACT
    return Finding(settle(identity and each_breaks and whatever_the_other, identity), figures)


def _token_error(
    logits: Tensor, old: Tensor, sampler: Tensor, sequences: Sequences, returns: Tensor
) -> float:
    gradients = mismatch_gradients(logits, old, sampler, sequences, returns)
    return flat_error(gradients["both factors, per token"], gradients["both factors, product"])
