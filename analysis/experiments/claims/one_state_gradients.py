"""Claims about the expected gradient of a KL term at one state, enumerated over the vocabulary."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from analysis.experiments.chapters.completion_weights import weight_table
from analysis.experiments.chapters.gradients import (
    Policies,
    derivation_errors,
    drifted_logits,
    random_policies,
    random_tables,
)
from analysis.experiments.chapters.one_state import noise_ratio
from analysis.experiments.claims import Finding, decides, settle
from analysis.kl.divergences import reverse_kl
from analysis.kl.enumeration import (
    exact_kl_gradient,
    expected_gradient,
    gradient_moments,
    relative_error,
)
from analysis.kl.potentials import half_squared_distance
from analysis.kl.sequences import enumerate_sequences, expected_sequence_gradient
from analysis.kl.surrogates import gradient_coefficient, kl_loss
from analysis.kl.variance import estimator_means

EXACT = 1e-12


@cache
def pairs() -> Policies:
    """300 policies far from their references, vocabulary of 16."""
    return random_policies(300, 16, spread=1.5, seed=4)


@cache
def stale() -> Tensor:
    """For each policy an older one that sampled."""
    return drifted_logits(pairs().logits, torch.tensor([0.7], dtype=torch.float64), seed=5)[0]


def error_to(direction: str, estimator: str, old: Tensor | None = None, **arm: str) -> Tensor:
    """[300]: relative error of an arm's expected gradient against an exact KL gradient."""
    gradient = expected_gradient(*pairs(), old, estimator=estimator, **arm)
    return relative_error(gradient, exact_kl_gradient(*pairs(), direction=direction))


def _worst(values: Tensor) -> float:
    return values.abs().max().item()


def _median(values: Tensor) -> float:
    return values.median().item()


@decides("S0-4")
def grpo_names_the_reverse_kl() -> Finding:
    """Mean of k3 against the reverse KL's sum; its expected gradient against both exact ones.

    Also the share that is not the forward KL's under GRPO's 1/|o|, on ragged sequences.
    """
    value = _worst(estimator_means(*pairs())["k3"] - reverse_kl(*pairs()))
    forward, reverse = error_to("forward", "k3"), error_to("reverse", "k3")
    figures = {
        "value_to_reverse": value,
        "gradient_to_forward": _worst(forward),
        "gradient_to_reverse": _median(reverse),
        "off_under_mean": weight_table([(3, 4)], 40, spread=1.5, seed=6)["k3"].item(),
    }
    return Finding(settle(value < EXACT and _worst(reverse) < EXACT, value < EXACT), figures)


@decides("S4-8")
def reverse_kl_gradient_formula() -> Finding:
    """Every line of the derivation from the softmax Jacobian, against autograd through the KL."""
    lines = derivation_errors(pairs())
    figures = {
        "error": lines.error.max(),
        "error_flipped": lines.error_flipped.min(),
    }
    return Finding(settle(figures["error"] < EXACT < figures["error_flipped"], False), figures)


@decides("S4-10")
def k2_loss_is_the_kl_gradient() -> Finding:
    """Autograd through the k2 loss, averaged over the vocabulary, fresh and stale."""
    fresh, old = error_to("reverse", "k2"), error_to("reverse", "k2", stale())
    detached = error_to("reverse", "k2", stale(), weighting="detached")
    figures = {"fresh": _worst(fresh), "stale": _median(old), "stale_weighted": _worst(detached)}
    return Finding(settle(_worst(old) < EXACT, _worst(fresh) < EXACT), figures)


@decides("S4-15")
def k1_loss_has_no_gradient() -> Finding:
    """Norm of the k1 loss's expected gradient on fresh samples; on stale ones for contrast.

    On ragged sequences with tokens summed, and under GRPO's 1/|o|.
    """
    fresh = expected_gradient(*pairs(), estimator="k1").norm(dim=-1)
    old = expected_gradient(*pairs(), stale(), estimator="k1").norm(dim=-1)
    sequences = enumerate_sequences(3, 4, eos=2)
    tables = random_tables(sequences, 3, 1, spread=1.5, seed=6)
    ragged = (tables.logits[0], tables.ref_logits[0], sequences)
    lengths = sequences.mask.sum(dim=-1, keepdim=True).double()
    by_sum, by_mean = (
        expected_sequence_gradient(*ragged, estimator="k1", token_weights=weights).norm().item()
        for weights in (torch.ones_like(lengths), 1 / lengths)
    )
    figures = {
        "fresh": _worst(fresh),
        "stale": _median(old),
        "token_sum": by_sum,
        "one_over_length": by_mean,
    }
    sometimes = max(figures["fresh"], figures["token_sum"]) < EXACT
    always = sometimes and max(figures["stale"], figures["one_over_length"]) < EXACT
    return Finding(settle(always, sometimes), figures)


@decides("S4-11")
def a_loss_is_not_a_gradient() -> Finding:
    """Type of both sides of eq. (15), and the coefficient named k3 against k3's own."""
    logits, ref_logits = (x[0] for x in pairs())
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    loss = (logp.exp() * kl_loss(logp, ref_logp, estimator="k2")).sum(-1)
    gradient = expected_gradient(logits, ref_logits, estimator="k2")
    coefficient = {k: gradient_coefficient(logp, ref_logp, estimator=k) for k in ("k2", "k3")}
    log_ratio = logp - ref_logp
    figures = {
        "axes_of_loss": float(loss.ndim),
        "axes_of_gradient": float(gradient.ndim),
        "label_k2_gap": _worst(coefficient["k2"] - log_ratio),
        "label_k3_gap": _worst(coefficient["k3"] - log_ratio),
    }
    typed = loss.ndim == gradient.ndim
    labelled = figures["label_k3_gap"] < EXACT
    return Finding(settle(typed and labelled, typed or labelled), figures)


@decides("S4-18")
def k3_loss_gradient_formula() -> Finding:
    """The printed coefficient, with the sampler's ratio, against autograd; series and asymmetry."""
    errors = {}
    for name, old in (("fresh", pairs().logits), ("stale", stale())):
        mean = expected_gradient(*pairs(), old, estimator="k3")
        old_logp, ref_logp = old.log_softmax(-1), pairs().ref_logits.log_softmax(-1)
        printed = old_logp.exp() * torch.expm1(ref_logp - old_logp)
        printed = printed - pairs().logits.softmax(-1) * printed.sum(-1, keepdim=True)
        errors[name] = relative_error(-printed, mean)
    step = torch.tensor(1e-4, dtype=torch.float64)
    figures = {
        "fresh": _worst(errors["fresh"]),
        "stale": _median(errors["stale"]),
        "second_order": ((torch.expm1(step) - step) / step.square()).item(),
        "asymmetry_at_2": math.expm1(2.0) / -math.expm1(-2.0),
        "bias_to_reverse": _median(error_to("reverse", "k3")),
        "bias_to_forward": _worst(error_to("forward", "k3")),
    }
    always = _worst(errors["stale"]) < EXACT
    return Finding(settle(always, figures["fresh"] < EXACT), figures)


@decides("S3-7")
def derivative_of_the_mean_of_k2() -> Finding:
    """Autograd through the whole sum over policy times k2, against the exact KL gradient."""
    leaf = pairs().logits.clone().requires_grad_(True)
    (full,) = torch.autograd.grad(estimator_means(leaf, pairs().ref_logits)["k2"].sum(), leaf)
    error = relative_error(full, exact_kl_gradient(*pairs(), direction="reverse"))
    figures = {
        "gradient_of_mean": _median(error),
        "mean_of_gradient": _worst(error_to("reverse", "k2")),
    }
    return Finding(settle(_worst(error) < EXACT, False), figures)


@decides("S3-6")
def kl_as_a_separate_loss() -> Finding:
    """The three ways to differentiate the separate KL term, against the exact gradient."""
    whole = expected_gradient(*pairs(), estimator="k1", weighting="attached")
    exact = exact_kl_gradient(*pairs(), direction="reverse")
    figures = {
        "whole_vocabulary": _worst(relative_error(whole, exact)),
        "k2_sampled": _worst(error_to("reverse", "k2")),
        "k3_sampled": _median(error_to("reverse", "k3")),
    }
    right = max(figures["whole_vocabulary"], figures["k2_sampled"]) < EXACT
    return Finding(settle(right and figures["k3_sampled"] < EXACT, right), figures)


@decides("S3-11")
def which_estimator_goes_where() -> Finding:
    """Each row of the table against the exact gradient; one-sample noise of the three arms."""
    ratio = noise_ratio(*pairs())
    reward = gradient_moments(*pairs(), estimator="k1", placement="reward").trace_var
    loss = gradient_moments(*pairs(), estimator="k2").trace_var
    figures = {
        "k1_reward": _worst(error_to("reverse", "k1", placement="reward")),
        "k2_loss": _worst(error_to("reverse", "k2")),
        "k3_loss": _median(error_to("reverse", "k3")),
        "k3_noisier_share": (ratio > 1).double().mean().item(),
        "k3_over_k2_noise": _median(ratio),
        "k2_loss_over_k1_reward_noise": _median(loss / reward),
    }
    rows = max(figures["k1_reward"], figures["k2_loss"]) < EXACT
    recommended = figures["k3_loss"] < EXACT and figures["k3_noisier_share"] == 0
    return Finding(settle(rows and recommended, rows), figures)


@decides("S4-2")
def the_placement_table() -> Finding:
    """All eight cells of the table at one state on fresh samples, and the k2 cell on stale ones."""
    exact = exact_kl_gradient(*pairs(), direction="reverse")
    forward = exact_kl_gradient(*pairs(), direction="forward")

    def is_kl(estimator: str, placement: str) -> bool:
        return _worst(error_to("reverse", estimator, placement=placement)) < EXACT

    good = [is_kl("k1", "reward"), is_kl("k2", "loss")]
    bad = [is_kl("k1", "loss"), is_kl("k2", "reward"), is_kl("k3", "reward"), is_kl("k3", "loss")]
    # 1 - r as a penalty is the k3 loss; differentiated as a loss its coefficient is r itself.
    logp, ref_logp = (x.log_softmax(-1) for x in pairs())
    moved = -logp.exp() * torch.expm1(ref_logp - logp)
    as_penalty = moved - logp.exp() * moved.sum(-1, keepdim=True)
    as_loss = ref_logp.exp() - logp.exp()
    bad += [_worst(relative_error(x, exact)) < EXACT for x in (as_penalty, as_loss)]
    figures = {
        "cells_right": float(sum(good) + len(bad) - sum(bad)),
        "transferred_k3_to_forward": _worst(relative_error(as_penalty, forward)),
        "stale_k2_loss": _median(error_to("reverse", "k2", stale())),
        "stale_k1_reward": _median(error_to("reverse", "k1", stale(), placement="reward")),
    }
    always = max(figures["stale_k2_loss"], figures["stale_k1_reward"]) < EXACT
    return Finding(settle(always, figures["cells_right"] == 8), figures)


@decides("S4-21")
def k3_loss_is_not_better() -> Finding:
    """k3 against k2 as losses: distance of the mean from the KL gradient, noise of one sample."""
    k2, k3 = error_to("reverse", "k2"), error_to("reverse", "k3")
    better = (k3 < k2).double().mean().item()
    figures = {
        "k3_closer_share": better,
        "k2_error": _worst(k2),
        "k3_error": _median(k3),
        "k3_less_noisy_share": (noise_ratio(*pairs()) < 1).double().mean().item(),
    }
    return Finding(settle(better == 1.0, better > 0), figures)


@decides("S4-24")
def minimax01_is_no_kl() -> Finding:
    """Its expected gradient against both KLs, against autograd through the squared distance, and
    the same coefficient summed over the vocabulary instead of sampled."""
    logits, ref_logits = pairs()
    leaf = logits.clone().requires_grad_(True)
    (squared,) = torch.autograd.grad(half_squared_distance(leaf, ref_logits).sum(), leaf)
    mean = expected_gradient(logits, ref_logits, estimator="minimax01")
    gap = logits.softmax(-1) - ref_logits.softmax(-1)
    summed = gap - logits.softmax(-1) * gap.sum(-1, keepdim=True)
    forward = exact_kl_gradient(*pairs(), direction="forward")
    figures = {
        "to_reverse": _median(error_to("reverse", "minimax01")),
        "to_forward": _median(error_to("forward", "minimax01")),
        "to_squared_distance": _worst(relative_error(mean, squared)),
        "summed_to_forward": _worst(relative_error(summed, forward)),
    }
    is_kl = min(figures["to_reverse"], figures["to_forward"]) < EXACT
    return Finding(settle(is_kl, False), figures)
