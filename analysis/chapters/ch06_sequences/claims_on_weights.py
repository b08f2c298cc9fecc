"""Claims on the weights of importance ratios: products, clips and masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.func import grad, jacrev

from analysis.chapters.ch06_sequences.claims_on_objectives import _near
from analysis.chapters.ch06_sequences.ratios import (
    _centred_returns,
    gradient_weights,
    one_recurrent_state,
    spread_curves,
)
from analysis.evidence.claims import EXACT, Finding, claim, judge, largest
from analysis.evidence.clip_slopes import EPSILON, clip_slopes
from analysis.evidence.policies import (
    RAGGED,
    by_token,
    flat_error,
    log_ratios,
    measured,
    normal_draws,
    ragged_tables,
    random_returns,
)
from analysis.evidence.recorded import difference, recorded
from kl_term.kl.credit import (
    credit_moments,
    sample_gradients,
)
from kl_term.kl.divergences import chi_square
from kl_term.kl.enumeration import (
    cosine,
    relative_error,
)
from kl_term.kl.products import (
    chi_square_bounds,
    markov_product_variance,
    product_variance,
    sequence_ratio_spread,
)
from kl_term.kl.ratio_objectives import (
    ratio_objective_gradient,
)
from kl_term.kl.scores import expected_score
from kl_term.kl.sequences import (
    enumerate_sequences,
    sequence_probability,
)
from kl_term.kl.truncation import keep_top, masked_logits


@claim("S3-21")
def product_variance_grows() -> Finding:
    """Variance of products of ratios: in closed form, over every sequence, and where one state
    alone changes, met once or again and again."""
    generator = torch.Generator().manual_seed(71)
    base, direction = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    moved = base + 0.3 * direction
    chi2 = chi_square(base, moved)
    iid, first_only = [], []
    for length in (1, 2, 3, 4, 5):
        tree = enumerate_sequences(3, length)
        logits, old = (row.repeat(tree.num_states, 1) for row in (moved, base))
        listed = sequence_ratio_spread(logits, old, tree).var
        iid.append((listed / product_variance(chi2, length) - 1).abs().item())
        logits[1:] = base
        first_only.append(sequence_ratio_spread(logits, old, tree).var.item())
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
    return Finding(judge(exponential and always, exponential), figures)


@claim("S3-23")
def gspo_weight() -> Finding:
    """GSPO's gradient identity, mean and spread of its weight beside the product's, and recorded
    runs."""
    old, direction = (x[0] for x in ragged_tables(1, seed=81))
    logits, lengths = old + 0.5 * direction, RAGGED.mask.sum(-1)

    def weights(at: Tensor) -> Tensor:
        return (log_ratios(at, old, RAGGED).sum(-1) / lengths).exp()

    credit = by_token(weights(logits) / lengths, RAGGED)
    by_hand = sample_gradients(logits, RAGGED, credit).flatten(1)

    def agreement(sampler: Tensor, direction: Tensor, seed: int) -> dict[str, Tensor]:
        returns = _centred_returns(sampler, RAGGED, seed=seed)
        exact, gspo = (
            ratio_objective_gradient(
                sampler + 0.2 * direction, sampler, RAGGED, returns, objective=name
            )
            for name in ("sequence", "geometric")
        )
        return {"cosine": cosine(gspo.flatten(), exact.flatten())}

    tables = ragged_tables(8, seed=83)
    spreads = spread_curves(old[1] + 0.3 * old[0], old[1], [10, 1000]).set_index("length")
    figures = {
        "identity_error": largest(relative_error(by_hand, jacrev(weights)(logits).flatten(1))),
        "std_10": spreads.geometric[10],
        "std_1000": spreads.geometric[1000],
        "product_std_1000": spreads["product"][1000],
        "mean_1000": spreads.geometric_mean[1000],
        "gradient_cosine": measured(agreement, *tables, range(8)).cosine.median(),
    }
    finals = recorded("objectives").finals
    for variant in ("gspo", "gspo_narrow"):
        figures |= difference(finals, variant, "grpo", "accuracy").figures(f"trained_{variant}")
    identity_and_spread = (
        figures["identity_error"] < EXACT
        and figures["std_1000"] < figures["std_10"] < figures["product_std_1000"]
    )
    comparable = _near(figures["std_10"] / figures["std_1000"], 1)
    return Finding(judge(identity_and_spread and comparable, identity_and_spread), figures)


@claim("S3-33")
def keep_sampling_mask() -> Finding:
    """Mean ratios and gradients under a top-p sampler, with and without its mask on the policy,
    against autograd through the mean return; and recorded runs."""
    old, direction, returns = normal_draws((3, 40, 16), seed=91)
    old, logits = 1.5 * old, 1.5 * old + 0.3 * direction
    keep = keep_top(old, top_p=0.9)
    sampler = masked_logits(old, keep).softmax(-1)
    masked = masked_logits(logits, keep)

    def estimated(policy_logits: Tensor) -> tuple[Tensor, Tensor]:
        weighted = sampler * torch.where(keep, policy_logits.softmax(-1) / sampler, 0.0)
        return weighted.sum(-1), expected_score(policy_logits, weighted * returns)

    exact = grad(lambda at: (at.softmax(-1) * returns).sum())
    masked_mean, masked_gradient = estimated(masked)
    plain_mean, plain_gradient = estimated(logits)
    figures = {
        "masked_mean_error": largest(masked_mean - 1),
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
    return Finding(judge(unbiased and figures["full_policy_error"] < EXACT, unbiased), figures)


@claim("S4-48")
def ppo_clip() -> Finding:
    """Slope of the clipped objective in all four corners, and where one ascent step ends."""
    good, bad = (clip_slopes(sign, (0.5, 1.5, 100.0)) for sign in (1.0, -1.0))
    start = torch.zeros(8, dtype=torch.float64)
    step = grad(lambda at: at.log_softmax(-1)[0])(start)  # of the ratio, where it is one
    ratio = ((start + 5.0 * step).log_softmax(-1) - start.log_softmax(-1))[0].exp().item()
    figures = {
        "good_above": good[1],
        "bad_below": bad[0],
        "good_below": good[0],
        "bad_above": bad[1],
        "bad_far_above": bad[2],
        "ratio_after_a_step": ratio,
        "pull_back": clip_slopes(1.0, [ratio])[0],
    }
    incentive_ends = figures["good_above"] == figures["bad_below"] == 0.0
    bounded = abs(figures["bad_far_above"]) <= 1.2 and figures["ratio_after_a_step"] <= 1.2
    return Finding(judge(incentive_ends and bounded, incentive_ends), figures)


@claim("S1-xt")
def ratio_alone_limits_nothing() -> Finding:
    """Slope of the unclipped ratio objective by the log-prob: a limit would make it fall as the
    ratio grows."""
    at_one, at_three = clip_slopes(1.0, (1.0, 3.0), epsilon=math.inf)
    clipped = clip_slopes(1.0, [3.0], epsilon=1.0)[0]  # to [0, 2]
    figures = {
        "slope_at_one": at_one,
        "slope_at_three": at_three,
        "slope_at_three_clipped": clipped,
    }
    return Finding("holds" if at_three <= at_one else "fails", figures)


@claim("S3-25")
def cispo_weight() -> Finding:
    """CISPO's gradient by autograd against the printed weight, the tokens that PPO's clip
    silences, the bias of the mean, and recorded runs."""
    old, direction = (x[0] for x in ragged_tables(1, seed=171))
    logits, returns = old + 0.5 * direction, random_returns(RAGGED, seed=172)
    cispo, ppo = (
        gradient_weights(logits, old, RAGGED, returns, weight=kind) for kind in ("cispo", "grpo")
    )
    ratio = log_ratios(logits, old, RAGGED).exp()
    printed = ratio.clamp(1 - EPSILON, 1 + EPSILON) * returns[:, None]
    exact = ratio_objective_gradient(logits, old, RAGGED, returns)
    visits = sequence_probability(old, RAGGED)[:, None] * RAGGED.mask
    figures = {
        "printed_error": largest((cispo - printed)[RAGGED.mask]),
        "silenced_share": (visits * (cispo == 0)).sum().item() / visits.sum().item(),
        "silenced_share_ppo": (visits * (ppo == 0)).sum().item() / visits.sum().item(),
        "off_policy_bias": flat_error(credit_moments(logits, RAGGED, cispo, old).mean, exact),
    }
    finals = recorded("objectives").finals
    for other in ("grpo", "reinforce"):
        gain = difference(finals, "cispo", other, "accuracy")
        figures |= gain.figures(f"trained_against_{other}")
    as_printed = figures["printed_error"] < EXACT
    return Finding(judge(as_printed and figures["silenced_share"] == 0.0, as_printed), figures)
