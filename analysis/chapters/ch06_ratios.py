"""Chapter 6: importance ratios along a sequence: first orders, products, clips and masks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad, jacrev

from analysis import style
from analysis.chapters.ch06_credit import RAGGED, SPREAD
from analysis.chapters.claims import EXACT, Finding, claim, difference, judge, largest, recorded
from analysis.chapters.policies import (
    Policies,
    flat_error,
    log_ratios,
    measured,
    medians,
    moved_logits,
    normal_draws,
    random_tables,
)
from analysis.kl.credit import advantage_table, credit_moments, sample_gradients
from analysis.kl.divergences import chi_square
from analysis.kl.enumeration import cosine, relative_error
from analysis.kl.importance import importance_ratio
from analysis.kl.products import (
    chi_square_bounds,
    geometric_spread,
    markov_product_variance,
    product_variance,
    sequence_ratio_spread,
)
from analysis.kl.ratio_objectives import (
    performance_difference,
    ratio_objective,
    ratio_objective_gradient,
    token_surrogate,
)
from analysis.kl.scores import expected_score
from analysis.kl.sequences import (
    Sequences,
    enumerate_sequences,
    sequence_probability,
    state_visits,
    token_logp,
)
from analysis.kl.truncation import keep_top, masked_logits
from analysis.objectives.losses import policy_loss

# --- Importance ratios: first orders, products and weights -----------------------------------

CLIPPED = ("gspo", "cispo", "grpo")
EPSILON = 0.2

#: The weights of the table, in reading order, and what the figure calls them.
WEIGHTS = {
    "none": "no weight",
    "token": "token ratio",
    "prefix": "prefix ratio",
    "sequence": "whole ratio",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "grpo": "GRPO, clipped",
}
OBJECTIVES = ("linear", "token_mean", "geometric")  #: of the token sum, GRPO and GSPO


def random_returns(sequences: Sequences, *, seed: int) -> Tensor:
    """[N] returns of standard deviation one, one a sequence."""
    return normal_draws((len(sequences.mask),), seed=seed)


def slope(sizes: Iterable[float], errors: Iterable[float]) -> float:
    """Order of an error: the slope of its logarithm against that of the step, by least squares."""
    return float(np.polyfit(*np.log([list(sizes), list(errors)]), deg=1)[0])


def order_curves(
    old_logits: Tensor, sequences: Sequences, sizes: Sequence[float], *, seed: int
) -> pd.DataFrame:
    """How fast the linear, GRPO and GSPO objectives leave the exact one as the step shrinks.

    Medians of the absolute error of the ``change`` since the sampler, and of the ``gradient``
    (relative).
    """
    rows = []
    for index, old in enumerate(old_logits):
        fixed = {"old_logits": old, "sequences": sequences}
        fixed["returns"] = random_returns(sequences, seed=seed + index)
        start = {n: ratio_objective(old, **fixed, objective=n) for n in (*OBJECTIVES, "sequence")}
        for size in sizes:
            logits = moved_logits(old, size, seed=seed + 1000 + index)
            gain = ratio_objective(logits, **fixed) - start["sequence"]
            exact = ratio_objective_gradient(logits, **fixed)
            for name in OBJECTIVES:
                promised = ratio_objective(logits, **fixed, objective=name) - start[name]
                gradient = ratio_objective_gradient(logits, **fixed, objective=name)
                row = {"objective": name, "size": size, "change": (promised - gain).abs().item()}
                rows.append(row | {"gradient": flat_error(gradient, exact)})
    return medians(rows, "objective", "size")


def spread_curves(logits: Tensor, old_logits: Tensor, lengths: Sequence[int]) -> pd.DataFrame:
    """Standard deviation of three weights of a sequence of independent tokens, by its length:
    ``product``, ``geometric`` (GSPO) and one ``token``."""
    length = torch.tensor(lengths, dtype=torch.float64)
    chi2 = chi_square(old_logits, logits)  # of the policy from the sampler
    mean, var = geometric_spread(logits, old_logits, length)
    return pd.DataFrame(
        {
            "length": lengths,
            "product": product_variance(chi2, length).sqrt(),
            "geometric": var.sqrt(),
            "geometric_mean": mean,
            "token": chi2.sqrt().expand_as(length),
        }
    )


def gradient_weights(
    logits: Tensor,
    old_logits: Tensor,
    sequences: Sequences,
    returns: Tensor,
    *,
    weight: str,
) -> Tensor:
    """[N, T] credit of each token: its importance weight, cut as its kind does, times the
    return."""
    logp, old_logp = (token_logp(x.detach(), sequences) for x in (logits, old_logits))
    per_token = returns.unsqueeze(-1).expand_as(logp)
    if weight == "none":
        return per_token
    if weight not in CLIPPED:
        return importance_ratio(logp, old_logp, sequences.mask, level=weight) * per_token
    fixed = {"old_logp": old_logp, "advantages": per_token, "mask": sequences.mask}
    return grad(lambda at: -policy_loss(at, kind=weight, **fixed).per_token.sum())(logp)


def weight_table(tables: Policies, sequences: Sequences, *, seed: int) -> pd.DataFrame:
    """Bias and noise of every weight against the gradient of the policy's own mean return.

    ``tables`` holds policies and their stale samplers; ``noise`` is the standard deviation of one
    sequence's gradient over the norm of the exact one.
    """
    rows = []
    for index, (logits, old) in enumerate(zip(*tables, strict=True)):
        returns = _centred_returns(old, sequences, seed=seed + index)
        exact = ratio_objective_gradient(logits, old, sequences, returns)
        for weight in WEIGHTS:
            credit = gradient_weights(logits, old, sequences, returns, weight=weight)
            mean, trace_var = credit_moments(logits, sequences, credit, old)
            noise = (trace_var.sqrt() / exact.norm()).item()
            rows.append({"weight": weight, "bias": flat_error(mean, exact), "noise": noise})
    return medians(rows, "weight")


def _centred_returns(old_logits: Tensor, sequences: Sequences, *, seed: int) -> Tensor:
    returns = random_returns(sequences, seed=seed)
    return returns - sequence_probability(old_logits, sequences) @ returns


def one_recurrent_state(vocab_size: int, stay: float) -> tuple[Tensor, Tensor]:
    """Policy and sampler [V + 1, V] of Markov tokens that differ after the first token only.

    The sampler is uniform; after the first token the policy repeats it with probability ``stay``.
    """
    sampler = torch.full((vocab_size + 1, vocab_size), 1 / vocab_size, dtype=torch.float64)
    policy = sampler.clone()
    policy[0] = (1 - stay) / (vocab_size - 1)
    policy[0, 0] = stay
    return policy.log(), sampler.log()


def clip_slopes(
    advantage: float, ratios: Iterable[float], *, epsilon: float = EPSILON
) -> list[float]:
    """Slope of the clipped objective of one token by its log-prob, at each ratio to the sampler."""
    log_ratio = torch.tensor([list(ratios)], dtype=torch.float64).log()
    fixed = {"old_logp": torch.zeros_like(log_ratio), "mask": torch.ones_like(log_ratio).bool()}
    fixed |= {"advantages": torch.full_like(log_ratio, advantage)}
    clip = {"epsilon_low": min(epsilon, 1.0), "epsilon_high": epsilon}
    slopes = grad(lambda at: -policy_loss(at, **fixed, **clip).per_token.sum())(log_ratio)
    return slopes[0].tolist()


# --- What it draws ---------------------------------------------------------------------------

SPREAD_LOOKS = {
    "product": {"color": "#111111", "label": "product"},
    "token": {"color": "#3D5A9E", "label": "one token"},
    "geometric": {"color": "#7A3E9D", "label": "GSPO"},
}


def draw_spreads(curves: pd.DataFrame) -> Figure:
    """Standard deviation of a sequence's weight against its length, both axes logarithmic."""
    shown = curves.melt("length", list(SPREAD_LOOKS)).query("value < 1e4")
    labels = {"xlabel": "tokens in a sequence (log scale)"}
    labels |= {"ylabel": "standard deviation of the\nweight (log scale)"}
    looks = {"kind": "variable", "looks": SPREAD_LOOKS}
    return style.lines(shown, "length", "value", **looks, **labels, **style.LOG_LOG)


def draw_weights(table: pd.DataFrame) -> Figure:
    """Bias and noise of seven off-policy weights, a row each."""
    columns = {
        "bias": "bias\n(relative error)",
        "noise": "noise of a sequence\n(norms of the gradient)",
    }
    shown = table.assign(label=table.weight.map(WEIGHTS))
    return style.lollipops(shown, "label", columns, colour="#3D5A9E")


# --- The claims it decides -------------------------------------------------------------------

SIZES = (0.005, 0.01, 0.02, 0.04)  #: steps over which an order is measured
ORDER = 0.1  #: how near a measured slope must come to a whole order


def _near(value: float, target: float) -> bool:
    return abs(value - target) < ORDER


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
    old, direction = (x[0] for x in random_tables(RAGGED, 3, 1, spread=SPREAD, seed=81))
    logits, lengths = old + 0.5 * direction, RAGGED.mask.sum(-1)

    def weights(at: Tensor) -> Tensor:
        return (log_ratios(at, old, RAGGED).sum(-1) / lengths).exp()

    credit = (weights(logits) / lengths).unsqueeze(-1).expand(RAGGED.mask.shape)
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

    tables = random_tables(RAGGED, 3, 8, spread=SPREAD, seed=83)
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


@claim("S3-34")
def token_objective_is_first_order() -> Finding:
    """Measured orders of the token objective's error: slopes over steps of four sizes."""
    old_logits = random_tables(RAGGED, 3, 8, spread=SPREAD, seed=101).logits
    curves = order_curves(old_logits, RAGGED, SIZES, seed=102)
    linear, mean = (curves[curves.objective == name] for name in ("linear", "token_mean"))
    old, returns = old_logits[0], random_returns(RAGGED, seed=103)
    at_sampler = {
        name: ratio_objective_gradient(old, old, RAGGED, returns, objective=name)
        for name in ("sequence", "token", "token_mean")
    }
    figures = {
        "gradient_error_at_sampler": flat_error(at_sampler["token"], at_sampler["sequence"]),
        "value_order": slope(linear["size"], linear.change),
        "gradient_order": slope(linear["size"], linear.gradient),
        "length_mean_error": flat_error(at_sampler["token_mean"], at_sampler["sequence"]),
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
    return Finding(judge(first_order and everywhere, first_order), figures)


def _gradient_error(length: int, size: float = 0.2) -> float:
    """Median relative error of the token gradient at one step size, by length."""
    sequences = enumerate_sequences(2, length)
    tables = random_tables(sequences, 2, 6, spread=SPREAD, seed=104)
    curves = order_curves(tables.logits, sequences, (size,), seed=105)
    return curves[curves.objective == "linear"].gradient.item()


@claim("S3-35")
def two_factors_of_the_ratio() -> Finding:
    """Each factor alone, the first one dropped, and both cancelling, on enumerated sequences."""
    tables = random_tables(RAGGED, 3, 8, spread=SPREAD, seed=111)
    found = pd.DataFrame(
        measured(partial(_factor_errors, size=size), *tables, range(8)).median() for size in SIZES
    )
    figures = {
        "identity_error": found.identity.max(),
        "gap_order": slope(SIZES, found.gap),
        "stale_order": slope(SIZES, found.stale),
        "dropped_order": slope(SIZES, found.dropped),
        "dropped_over_kept": (found.dropped / found.gap).iloc[-1],
        "cancelled_error": found.cancelled.max(),
    }
    identity = figures["identity_error"] < EXACT
    each_breaks = all(_near(figures[f"{name}_order"], 1) for name in ("gap", "stale"))
    whatever_the_other = figures["cancelled_error"] > EXACT
    return Finding(judge(identity and each_breaks and whatever_the_other, identity), figures)


def _factor_errors(old: Tensor, direction: Tensor, seed: int, size: float) -> dict[str, float]:
    """Errors of the token ratio, against the product of both factors, where a factor is not one."""
    returns = random_returns(RAGGED, seed=seed)
    moved, sampler = moved_logits(old, size, seed=seed), old + size * direction

    def error(logits: Tensor, sampler: Tensor, *, of: Tensor | None = None) -> float:
        """``of``: the policy that the ratio divides by, the sampler unless another is given."""
        logp, sampler_logp = (token_logp(x, RAGGED) for x in (logits, sampler))
        of_logp = sampler_logp if of is None else token_logp(of, RAGGED)
        product = importance_ratio(logp, sampler_logp, RAGGED.mask, level="sequence")
        exact, found = (
            credit_moments(logits, RAGGED, weight * returns.unsqueeze(-1), sampler).mean
            for weight in (product, importance_ratio(logp, of_logp, RAGGED.mask))
        )
        return flat_error(found, exact)

    first, second, both = (
        log_ratios(*pair, RAGGED).sum(-1).exp()
        for pair in ((old, sampler), (moved, old), (moved, sampler))
    )
    return {
        "gap": error(old, sampler),
        "stale": error(moved, old),
        "cancelled": error(sampler, sampler),
        "dropped": error(old, sampler, of=old),
        "identity": largest(first * second / both - 1),
    }


def _advantages(logits: Tensor, sequences: Sequences, returns: Tensor) -> Tensor:
    whole = returns[:, None].expand(sequences.mask.shape)
    return advantage_table(whole, logits, sequences)


@claim("S4-46")
def token_ratio_surrogate() -> Finding:
    """The surrogate with dropped state ratio against the exact improvement; beside it the
    performance-difference lemma, which keeps the ratio."""
    old_logits = random_tables(RAGGED, 3, 8, spread=SPREAD, seed=121).logits
    steps = {
        size: measured(partial(_step_errors, size=size), old_logits, range(8))
        for size in (*SIZES, 0.5)
    }
    found = pd.DataFrame(x.median() for x in steps.values())
    figures = {
        "lemma_error": max(x.lemma.max() for x in steps.values()),
        "one_token_error": max(x.one_token.max() for x in steps.values()),
        "value_order": slope(SIZES, found.value[:-1]),
        "gradient_order": slope(SIZES, found.gradient[:-1]),
        "gradient_error": found.gradient.iloc[-1],
        "largest_value_error": steps[0.5].share.max(),
    }
    referee_agrees = max(figures["lemma_error"], figures["one_token_error"]) < EXACT
    biased = figures["gradient_error"] > EXACT and _near(figures["value_order"], 2)
    return Finding("fails" if referee_agrees and biased else "holds", figures)


def _step_errors(old: Tensor, seed: int, size: float) -> dict[str, float]:
    """Errors of the surrogate and the lemma after one step, and of a policy of one token."""
    returns, one_token = random_returns(RAGGED, seed=seed), enumerate_sequences(3, 1)
    logits = moved_logits(old, size, seed=seed)
    found = _improvement_errors(logits, old, RAGGED, returns)
    bandit = _improvement_errors(logits[:1], old[:1], one_token, returns[:3])
    return found | {"one_token": bandit["value"]}


def _improvement_errors(
    logits: Tensor, old: Tensor, sequences: Sequences, returns: Tensor
) -> dict[str, float]:
    """Errors of the gain that surrogate and lemma promise, and of the surrogate's gradient."""
    fixed = (old, sequences, _advantages(old, sequences, returns))
    change = sequence_probability(logits, sequences) - sequence_probability(old, sequences)
    gain = change @ returns
    value = (token_surrogate(logits, *fixed) - gain).abs()
    gradient = grad(token_surrogate)(logits, *fixed)
    return {
        "value": value.item(),
        "share": (value / gain.abs()).item(),
        "lemma": (performance_difference(logits, *fixed) - gain).abs().item(),
        "gradient": flat_error(gradient, ratio_objective_gradient(logits, old, sequences, returns)),
    }


@claim("S4-xd")
def two_approximations() -> Finding:
    """Orders at which state distribution and advantages leave the sampler's, and their depth."""
    sequences = enumerate_sequences(2, 7)
    depth = torch.zeros(sequences.num_states, dtype=torch.long)
    depth[sequences.states] = torch.arange(7).expand(sequences.states.shape)
    old_logits = random_tables(sequences, 2, 8, spread=SPREAD, seed=131).logits

    def gaps(old: Tensor, seed: int, size: float) -> dict[str, Tensor]:
        returns = random_returns(sequences, seed=seed)
        both = (old, moved_logits(old, size, seed=seed))
        before, after = (state_visits(x, sequences) for x in both)
        advantages = [_advantages(x, sequences, returns) for x in both]
        state = (after - before).abs()
        found = {f"depth_{n}": state[depth == n].sum() for n in (1, 6)}
        return found | {"state": state.sum(), "advantage": torch.dist(*advantages)}

    found = [measured(partial(gaps, size=size), old_logits, range(8)) for size in SIZES]
    middle, total = pd.DataFrame(x.median() for x in found), sum(x.sum() for x in found)
    figures = {
        "state_order": slope(SIZES, middle.state),
        "advantage_order": slope(SIZES, middle.advantage),
        "depth_growth": total.depth_6 / total.depth_1,
    }
    first_order = all(_near(figures[f"{k}_order"], 1) for k in ("state", "advantage"))
    uniform = figures["depth_growth"] < 1 + ORDER
    return Finding(judge(first_order and uniform, first_order), figures)


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
    old, direction = (x[0] for x in random_tables(RAGGED, 3, 1, spread=SPREAD, seed=171))
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
