"""What each KL term optimises in expectation, enumerated: chapter 2."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad

from analysis.evidence.claims import (
    EXACT,
    Finding,
    claim,
    error_of,
    judge,
    largest,
    median,
    percentiles,
    share,
)
from analysis.evidence.far_policies import error_to, ragged, stale, typical, worst
from analysis.evidence.length_weights import weight_errors
from analysis.evidence.noise_ratio import noise_ratio
from analysis.evidence.policies import (
    RAGGED,
    SAME,
    Policies,
    by_token,
    flat_error,
    normal_draws,
    pairs,
    random_tables,
)
from kl_term import style
from kl_term.kl.credit import credit_moments
from kl_term.kl.divergences import half_squared_distance, reverse_kl
from kl_term.kl.enumeration import (
    cosine,
    exact_kl_gradient,
    expected_gradient,
    gradient_moments,
    relative_error,
)
from kl_term.kl.scores import expected_score
from kl_term.kl.sequences import (
    Sequences,
    expected_sequence_gradient,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
    visited_kl_gradient,
)
from kl_term.kl.surrogates import gradient_coefficient, kl_loss
from kl_term.kl.term import KLTerm
from kl_term.kl.variance import estimator_means
from kl_term.objectives.losses import policy_loss

# --- What it computes


LOSS_AND_REWARD = tuple(
    KLTerm(estimator=estimator, placement=placement)
    for placement in ("loss", "reward")
    for estimator in ("k1", "k2", "k3")
)


def one_state_table(policies: Policies, terms: Iterable[KLTerm] = LOSS_AND_REWARD) -> pd.DataFrame:
    """Expected on-policy gradient of each term beside the reverse KL's: medians over policies.

    ``optimises`` names the exact gradient that the term equals at *every* policy, to ``SAME``.
    """
    exact = {d: exact_kl_gradient(*policies, direction=d) for d in ("reverse", "forward")}
    exact["reverse − forward"] = exact["reverse"] - exact["forward"]
    return pd.DataFrame(
        term.at_one_state | _compare(expected_gradient(*policies, **term.at_one_state), exact)
        for term in terms
    )


def error_curves(terms: Iterable[KLTerm], *policies: Tensor) -> pd.DataFrame:
    """Relative error of each term against the reverse KL's gradient, as :func:`percentiles` over N.

    ``policies``: the policy, its reference and, unless it is the policy, the sampler, [D, N, V] or
    the same for all D. A row a term and D, with medians of the KLs (nats) of policy from reference,
    ``kl``, and of sampler from policy, ``staleness``.
    """
    logits, ref_logits, *sampler = torch.broadcast_tensors(*policies)
    exact = exact_kl_gradient(logits, ref_logits, direction="reverse")
    kls = {"kl": (logits, ref_logits), "staleness": (sampler[0] if sampler else logits, logits)}
    at = {name: reverse_kl(*pair).median(dim=-1).values for name, pair in kls.items()}
    curves = []
    for term in terms:
        gradient = expected_gradient(logits, ref_logits, *sampler, **term.at_one_state)
        errors = percentiles(relative_error(gradient, exact))
        curves.append(pd.DataFrame({**term.at_one_state, **at, **errors}))
    return pd.concat(curves, ignore_index=True)


def noise_table(policies: Policies, terms: Iterable[KLTerm]) -> pd.DataFrame:
    """Samples for a signal-to-noise ratio of one: trace of one sample's gradient covariance over
    the squared norm of its mean, median over the policies."""
    rows = []
    for term in terms:
        mean, trace_var = gradient_moments(*policies, **term.at_one_state)
        samples = median(trace_var / mean.square().sum(-1))
        rows.append(term.at_one_state | {"samples_median": samples})
    return pd.DataFrame(rows)


#: The rows of the sequence table by these axes, the ratio attached.
SEQUENCE_AXES = ("placement", "level", "ratio", "credit")
SEQUENCE_ROWS = (
    ("loss", "token", "none", "immediate"),
    ("loss", "token", "prefix", "immediate"),
    ("loss", "sequence", "none", "immediate"),
    ("reward", "token", "none", "immediate"),
    ("reward", "token", "none", "to_go"),
    ("reward", "sequence", "none", "immediate"),
)


def sequence_table(tables: Policies, sequences: Sequences) -> pd.DataFrame:
    """On-policy terms over whole sequences against the exact gradients of the sequence KL and of
    the *visited* KL: per-token KL with the visited states held fixed."""

    def per_pair(gradient: Callable[..., Tensor], **options: str) -> Tensor:
        found = (gradient(*pair, sequences, **options) for pair in zip(*tables, strict=True))
        return torch.stack([x.flatten() for x in found])

    exact = {}
    for suffix, of in (("", sequence_kl_gradient), (" (visited)", visited_kl_gradient)):
        reverse, forward = (per_pair(of, direction=d) for d in ("reverse", "forward"))
        exact |= {f"reverse{suffix}": reverse, f"forward{suffix}": forward}
        exact[f"reverse − forward{suffix}"] = reverse - forward
    rows = []
    for estimator in ("k1", "k2", "k3"):
        for place in SEQUENCE_ROWS:
            choice = {"estimator": estimator, **dict(zip(SEQUENCE_AXES, place, strict=True))}
            ratio = {"weighting": "attached"} if choice["ratio"] == "prefix" else {"ratio": "token"}
            gradient = per_pair(expected_sequence_gradient, **choice | ratio)
            rows.append(choice | _compare(gradient, exact))
    return pd.DataFrame(rows)


def _compare(gradient: Tensor, exact: dict[str, Tensor]) -> dict[str, object]:
    """Medians of cosine and error against the reverse KL, the gradient that it equals, and how
    often descending it *raises* the reverse KL."""
    same = [name for name, g in exact.items() if error_of(gradient, g, worst=True) < SAME]
    angle = cosine(gradient, exact["reverse"])
    vanishes = bool((gradient.norm(dim=-1) < SAME * exact["reverse"].norm(dim=-1)).all())
    return {
        "cosine_reverse": torch.nan if vanishes else median(angle),
        "error_reverse": error_of(gradient, exact["reverse"]),
        "share_away": torch.nan if vanishes else share(angle < 0),
        "optimises": "nothing" if vanishes else (same or ["neither"])[0],
    }


# --- What it draws


def plot_coefficients(ref_logp: float, lowest_logp: float) -> Figure:
    """Coefficient of the score against the log-prob of the sampled token."""
    logp = torch.linspace(lowest_logp, 0.0, 241, dtype=torch.float64)
    figure, axes = style.subplots()
    labels = {"k1": "$k_1$ loss", "k2": "$k_2$ loss,\n$k_1$ reward", "k3": "$k_3$ loss"}
    for name in ("k1", "k2", "k3", "minimax01"):
        curve = gradient_coefficient(logp, torch.full_like(logp, ref_logp), estimator=name)
        axes.plot(logp, curve, **style.line(name, marker=""))
        label = labels.get(name, style.LABELS[name])
        style.note(axes, label, (lowest_logp, curve[0]), offset=(-6, 0), colour=name)
    style.guide(axes, x=ref_logp)
    at = {"xycoords": ("data", "axes fraction"), "va": "baseline"}
    equal = r"$\pi_\theta = \pi_{\mathrm{ref}}$"
    style.note(axes, equal, (ref_logp, 0.04), offset=(-6, 0), **at)
    axes.spines["left"].set_visible(False)
    axes.yaxis.set_ticks_position("right")
    axes.yaxis.set_label_position("right")
    axes.set_xlabel(r"$\log \pi_\theta$ of the sampled token (nats)")
    axes.set_ylabel(r"coefficient of $\nabla \log \pi_\theta$")
    return figure


def plot_drift(curves: pd.DataFrame) -> Figure:
    """Relative error against the exact reverse-KL gradient as the policy leaves its reference."""
    panels = {"loss": "as a loss", "reward": "in the reward"}
    figure = _error_panels(curves, "kl", "placement", panels, height=3.9)
    figure.supxlabel("reverse KL of the policy from its reference (nats)", fontsize="medium")
    return figure


def plot_staleness(curves: pd.DataFrame) -> Figure:
    """Relative error against the exact reverse-KL gradient as the sampler falls behind."""
    panels = {"none": "no weight", "detached": "detached ratio", "attached": "attached ratio"}
    figure = _error_panels(curves, "staleness", "weighting", panels, height=3.7)
    staleness = r"staleness $\mathrm{KL}(\pi_{\mathrm{old}} \Vert\, \pi_\theta)$ (nats)"
    figure.supxlabel(staleness, fontsize="medium")
    return figure


def _error_panels(
    curves: pd.DataFrame, x: str, column: str, titles: Mapping[str, str], *, height: float
) -> Figure:
    """A panel for each value of a column: the error of each term, from 10th to 90th percentile."""
    figure, panels = style.subplots(1, len(titles), sharey=True, height=height)
    panels[0].set_ylabel("relative error of the\nexpected gradient")
    for axes, (value, title) in zip(panels, titles.items(), strict=True):
        axes.set(ylim=(-0.08, 2.5), title=title)
        for term, curve in curves[curves[column] == value].groupby(["estimator", "placement"]):
            every = max(1, len(curve) // 6)
            style.band(axes, curve, x, **style.line(*term, markevery=every))
        style.label_line_ends(axes)
    return figure


# --- What it decides


@claim("S0-4")
def grpo_names_the_reverse_kl() -> Finding:
    """Mean and expected gradient of k3 against both KLs, and what GRPO's ``1/|o|`` adds to the
    forward KL's, on ragged sequences."""
    far = random_tables(RAGGED, 3, 40, spread=1.5, seed=6)
    value = largest(estimator_means(*pairs())["k3"] - reverse_kl(*pairs()))
    figures = {
        "value_to_reverse": value,
        "gradient_to_forward": worst("k3", of="forward"),
        "gradient_to_reverse": typical("k3"),
        "off_under_mean": weight_errors(far, RAGGED).k3.median(),
    }
    return Finding(judge(max(value, worst("k3")) < EXACT, value < EXACT), figures)


@claim("S4-8")
def reverse_kl_gradient_formula() -> Finding:
    """The expectation, summed over the vocabulary, against autograd through the KL."""
    logits, ref_logits = pairs()
    by_autograd = grad(lambda at: reverse_kl(at, ref_logits).sum())(logits)
    log_ratio = logits.log_softmax(-1) - ref_logits.log_softmax(-1)
    printed = expected_score(logits, logits.softmax(-1) * log_ratio)
    figures = {
        "error": largest(printed - by_autograd),
        "error_flipped": largest(printed + by_autograd),
    }
    return Finding(judge(figures["error"] < EXACT < figures["error_flipped"], False), figures)


@claim("S4-10")
def k2_loss_is_the_kl_gradient() -> Finding:
    """Autograd through the k2 loss, averaged over the vocabulary, fresh and stale."""
    figures = {
        "fresh": worst("k2"),
        "stale": typical("k2", stale()),
        "stale_weighted": worst("k2", stale(), weighting="detached"),
    }
    return Finding(judge(worst("k2", stale()) < EXACT, figures["fresh"] < EXACT), figures)


@claim("S4-15")
def k1_loss_has_no_gradient() -> Finding:
    """Norm of the k1 loss's expected gradient: fresh, stale, and on ragged sequences with tokens
    summed and under GRPO's ``1/|o|``."""
    fresh = expected_gradient(*pairs(), estimator="k1").norm(dim=-1)
    old = expected_gradient(*pairs(), stale(), estimator="k1").norm(dim=-1)
    (table,), (reference,) = random_tables(RAGGED, 3, 1, spread=1.5, seed=6)
    lengths = by_token(RAGGED.mask.sum(dim=-1).double(), RAGGED)
    by_sum, by_mean = (
        expected_sequence_gradient(table, reference, RAGGED, estimator="k1", token_weights=weights)
        for weights in (torch.ones_like(lengths), 1 / lengths)
    )
    figures = {
        "fresh": largest(fresh),
        "stale": median(old),
        "token_sum": by_sum.norm().item(),
        "one_over_length": by_mean.norm().item(),
    }
    sometimes = max(figures["fresh"], figures["token_sum"]) < EXACT
    return Finding(judge(sometimes and max(figures.values()) < EXACT, sometimes), figures)


@claim("S4-11")
def a_loss_is_not_a_gradient() -> Finding:
    """Type of both sides of eq. (15), and the coefficient named k3 against k3's own."""
    logits, ref_logits = (x[0] for x in pairs())
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    loss = (logp.exp() * kl_loss(logp, ref_logp, estimator="k2")).sum(-1)
    gradient = expected_gradient(logits, ref_logits, estimator="k2")
    gaps = {
        k: largest(gradient_coefficient(logp, ref_logp, estimator=k) - (logp - ref_logp))
        for k in ("k2", "k3")
    }
    figures = {
        "axes_of_loss": float(loss.ndim),
        "axes_of_gradient": float(gradient.ndim),
        "label_k2_gap": gaps["k2"],
        "label_k3_gap": gaps["k3"],
    }
    typed, labelled = loss.ndim == gradient.ndim, gaps["k3"] < EXACT
    return Finding(judge(typed and labelled, typed or labelled), figures)


@claim("S4-18")
def k3_loss_gradient_formula() -> Finding:
    """The printed coefficient, with the sampler's ratio, against autograd; series and asymmetry."""
    errors = {}
    for name, old in (("fresh", pairs().logits), ("stale", stale())):
        old_logp, ref_logp = old.log_softmax(-1), pairs().ref_logits.log_softmax(-1)
        ascent = old_logp.exp() * torch.expm1(ref_logp - old_logp)
        mean = expected_gradient(*pairs(), old, estimator="k3")
        errors[name] = relative_error(-expected_score(pairs().logits, ascent), mean)
    step = torch.tensor(1e-4, dtype=torch.float64)
    figures = {
        "fresh": largest(errors["fresh"]),
        "stale": median(errors["stale"]),
        "second_order": ((torch.expm1(step) - step) / step.square()).item(),
        "asymmetry_at_2": math.expm1(2.0) / -math.expm1(-2.0),
        "bias_to_reverse": typical("k3"),
        "bias_to_forward": worst("k3", of="forward"),
    }
    return Finding(judge(largest(errors["stale"]) < EXACT, figures["fresh"] < EXACT), figures)


@claim("S3-7")
def derivative_of_the_mean_of_k2() -> Finding:
    """Autograd through the whole sum over policy times k2, against the exact KL gradient."""
    logits, ref_logits = pairs()
    full = grad(lambda at: estimator_means(at, ref_logits)["k2"].sum())(logits)
    error = relative_error(full, exact_kl_gradient(*pairs(), direction="reverse"))
    figures = {"gradient_of_mean": median(error), "mean_of_gradient": worst("k2")}
    return Finding(judge(largest(error) < EXACT, False), figures)


@claim("S3-6")
def kl_as_a_separate_loss() -> Finding:
    """The three ways to differentiate the separate KL term, against the exact gradient."""
    figures = {
        "whole_vocabulary": worst("k1", weighting="attached"),
        "k2_sampled": worst("k2"),
        "k3_sampled": typical("k3"),
    }
    right = max(figures["whole_vocabulary"], figures["k2_sampled"]) < EXACT
    return Finding(judge(right and figures["k3_sampled"] < EXACT, right), figures)


@claim("S3-11")
def which_estimator_goes_where() -> Finding:
    """Each row of the table against the exact gradient; one-sample noise of the three variants."""
    ratio = noise_ratio(*pairs())
    reward = gradient_moments(*pairs(), estimator="k1", placement="reward").trace_var
    loss = gradient_moments(*pairs(), estimator="k2").trace_var
    figures = {
        "k1_reward": worst("k1", placement="reward"),
        "k2_loss": worst("k2"),
        "k3_loss": typical("k3"),
        "k3_noisier_share": share(ratio > 1),
        "k3_over_k2_noise": median(ratio),
        "k2_loss_over_k1_reward_noise": median(loss / reward),
    }
    rows = max(figures["k1_reward"], figures["k2_loss"]) < EXACT
    recommended = figures["k3_loss"] < EXACT and figures["k3_noisier_share"] == 0
    return Finding(judge(rows and recommended, rows), figures)


@claim("S4-2")
def the_placement_table() -> Finding:
    """All eight cells of the table at one state on fresh samples, and the k2 cell on stale ones."""
    table = one_state_table(pairs()).set_index(["estimator", "placement"]).optimises
    kl_terms = {("k1", "reward"), ("k2", "loss")}
    right = sum((cell in kl_terms) == (of == "reverse") for cell, of in table.items())
    # 1 - r as a penalty is the k3 loss; differentiated as a loss its coefficient is r itself.
    logp, ref_logp = (x.log_softmax(-1) for x in pairs())
    as_penalty = expected_score(logp, -logp.exp() * torch.expm1(ref_logp - logp))
    as_loss = ref_logp.exp() - logp.exp()
    exact = {d: exact_kl_gradient(*pairs(), direction=d) for d in ("reverse", "forward")}
    right += sum(error_of(x, exact["reverse"], worst=True) > EXACT for x in (as_penalty, as_loss))
    figures = {
        "cells_right": float(right),
        "transferred_k3_to_forward": error_of(as_penalty, exact["forward"], worst=True),
        "stale_k2_loss": typical("k2", stale()),
        "stale_k1_reward": typical("k1", stale(), placement="reward"),
    }
    always = max(figures["stale_k2_loss"], figures["stale_k1_reward"]) < EXACT
    return Finding(judge(always, right == 8), figures)


@claim("S4-21")
def k3_loss_is_not_better() -> Finding:
    """k3 against k2 as losses: distance of the mean from the KL gradient, noise of one sample."""
    k2, k3 = error_to("reverse", "k2"), error_to("reverse", "k3")
    better = share(k3 < k2)
    figures = {
        "k3_closer_share": better,
        "k2_error": largest(k2),
        "k3_error": median(k3),
        "k3_less_noisy_share": share(noise_ratio(*pairs()) < 1),
    }
    return Finding(judge(better == 1.0, better > 0), figures)


@claim("S4-24")
def minimax01_is_no_kl() -> Finding:
    """Its expected gradient against both KLs, against autograd through the squared distance, and
    the same coefficient summed over the vocabulary instead of sampled."""
    logits, ref_logits = pairs()
    squared = grad(lambda at: half_squared_distance(at, ref_logits).sum())(logits)
    mean = expected_gradient(logits, ref_logits, estimator="minimax01")
    summed = expected_score(logits, logits.softmax(-1) - ref_logits.softmax(-1))
    forward = exact_kl_gradient(logits, ref_logits, direction="forward")
    figures = {
        "to_reverse": typical("minimax01"),
        "to_forward": typical("minimax01", of="forward"),
        "to_squared_distance": error_of(mean, squared, worst=True),
        "summed_to_forward": error_of(summed, forward, worst=True),
    }
    is_kl = min(figures["to_reverse"], figures["to_forward"]) < EXACT
    return Finding(judge(is_kl, False), figures)


@claim("S2-6")
def gradient_coefficient_of_grpo() -> Finding:
    """DeepSeekMath's eq. 3 by autograd against eq. 21 by hand, on ragged sequences, fresh and
    stale."""
    sequences, table, ref_table, old_table = ragged()
    advantages = normal_draws((len(sequences.tokens),), seed=7)
    ref_logp, lengths = token_logp(ref_table, sequences), sequences.mask.sum(-1, keepdim=True)

    def error(sampler: Tensor, *, sign: float = 1.0, mean: bool = True) -> float:
        old_logp, chance = token_logp(sampler, sequences), sequence_probability(sampler, sequences)

        def objective(at: Tensor) -> Tensor:
            logp, fixed = token_logp(at, sequences), {"mask": sequences.mask}
            loss = policy_loss(logp, old_logp=old_logp, advantages=advantages, **fixed).per_token
            penalty = kl_loss(logp, ref_logp, estimator="k3", **fixed)
            return chance @ ((-loss - 0.5 * penalty) / lengths).sum(-1)

        pull = torch.expm1(ref_logp - token_logp(table, sequences))
        coefficient = (advantages[:, None] + sign * 0.5 * pull) / (lengths if mean else 1)
        by_hand = credit_moments(table, sequences, coefficient, sampler).mean
        return flat_error(by_hand, grad(objective)(table))

    figures = {
        "fresh": error(table),
        "stale": error(old_table),
        "sign_flipped": error(table, sign=-1.0),
        "without_length": error(table, mean=False),
    }
    right = figures["fresh"] < EXACT < figures["sign_flipped"]
    return Finding(judge(right and figures["stale"] < EXACT, right), figures)
