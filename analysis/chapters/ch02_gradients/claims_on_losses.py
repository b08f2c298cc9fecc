"""Claims on what the estimators descend as losses."""

from __future__ import annotations

import math

import torch
from torch.func import grad

from analysis.evidence.claims import EXACT, Finding, claim, error_of, judge, largest, median
from analysis.evidence.far_policies import stale, typical, worst
from analysis.evidence.policies import RAGGED, by_token, pairs, random_tables
from kl_term.kl.divergences import half_squared_distance, reverse_kl
from kl_term.kl.enumeration import exact_kl_gradient, expected_gradient, relative_error
from kl_term.kl.scores import expected_score
from kl_term.kl.sequences import expected_sequence_gradient
from kl_term.kl.surrogates import gradient_coefficient, kl_loss
from kl_term.kl.variance import estimator_means


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


@claim("S4-10")
def k2_loss_is_the_kl_gradient() -> Finding:
    """Autograd through the k2 loss, averaged over the vocabulary, fresh and stale."""
    figures = {
        "fresh": worst("k2"),
        "stale": typical("k2", stale()),
        "stale_weighted": worst("k2", stale(), weighting="detached"),
    }
    return Finding(judge(worst("k2", stale()) < EXACT, figures["fresh"] < EXACT), figures)


@claim("S3-7")
def derivative_of_the_mean_of_k2() -> Finding:
    """Autograd through the whole sum over policy times k2, against the exact KL gradient."""
    logits, ref_logits = pairs()
    full = grad(lambda at: estimator_means(at, ref_logits)["k2"].sum())(logits)
    error = relative_error(full, exact_kl_gradient(*pairs(), direction="reverse"))
    figures = {"gradient_of_mean": median(error), "mean_of_gradient": worst("k2")}
    return Finding(judge(largest(error) < EXACT, False), figures)


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
