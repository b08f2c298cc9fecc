"""Claims about single samples at one state: direction of a step, noise, and what many steps do."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.experiments.ablations.summaries import fluctuation
from analysis.experiments.chapters.gradients import random_policies
from analysis.experiments.chapters.one_state import noise_ratio
from analysis.experiments.chapters.single_samples import (
    WALKS,
    coefficient_of,
    entropy_drift,
    sampled_descent,
    share_lowered,
    with_reward_noise,
)
from analysis.experiments.claims import Finding, decides, settle
from analysis.experiments.claims.one_state_gradients import EXACT, pairs
from analysis.experiments.claims.recorded import difference, recorded
from analysis.experiments.statistics import Interval
from analysis.kl.divergences import entropy, reverse_kl
from analysis.kl.enumeration import expected_gradient, gradient_moments
from analysis.kl.surrogates import gradient_coefficient, kl_loss


def uniform(runs: int) -> Tensor:
    return torch.zeros(runs, 8, dtype=torch.float64)


def _median_kl(estimator: str, *, beta: float, step_size: float, batch_size: int = 1) -> float:
    """Median KL to a uniform reference after 600 noisy steps from it: log 8 is collapse."""
    end = sampled_descent(
        uniform(60),
        uniform(60),
        with_reward_noise(coefficient_of(estimator), beta=beta, seed=1),
        step_size=step_size,
        steps=600,
        batch_size=batch_size,
        seed=2,
    )[-1]
    return reverse_kl(end, uniform(60)).median().item()


@decides("S4-16")
def k1_loss_walks_at_random() -> Finding:
    """Every token's own probability after one step on it, exactly; then 3000 single-sample steps
    of 200 runs, beside the same runs with the sign flipped and with a tenth of the step."""
    k1 = WALKS["k1"]
    lowered = min(share_lowered(*pairs(), k1, step_size=eta) for eta in (0.1, 1.0, 10.0))
    runs = 200
    signs = torch.ones(3 * runs, 1, dtype=torch.float64)
    signs[runs : 2 * runs] = -1.0  # raises the sampled token instead
    signs[2 * runs :] = 0.1
    end = sampled_descent(
        uniform(3 * runs),
        uniform(3 * runs),
        lambda logp, ref_logp: signs,
        step_size=0.1,
        steps=3000,
        seed=3,
    )[-1]
    ends = entropy(end).unflatten(0, (3, runs))
    start = entropy(uniform(1)).item()
    spread = (ends[:2].var(-1).sum() / runs).sqrt().item()
    figures = {
        "share_lowered": lowered,
        "expected_step": expected_gradient(*pairs(), estimator="k1").abs().max().item(),
        "entropy_drift_one_step": entropy_drift(uniform(1), step_size=0.1).item(),
        "entropy_start": start,
        "entropy_k1": ends[0].mean().item(),
        "entropy_flipped": ends[1].mean().item(),
        "k1_minus_flipped_ci95": 1.96 * spread,
        "entropy_small_step": ends[2].mean().item(),
    }
    collapses = [figures[k] < 0.5 * start for k in ("entropy_k1", "entropy_small_step")]
    because_lowered = figures["entropy_flipped"] > 0.9 * start
    per_sample = lowered == 1.0
    return Finding(settle(per_sample and all(collapses) and because_lowered, per_sample), figures)


@decides("S4-17")
def the_sign_of_one_k2_step() -> Finding:
    """One descent step of the k2 loss on every token that the reference prefers."""
    logp, ref_logp = (x.log_softmax(-1) for x in pairs())
    leaf = logp.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(kl_loss(leaf, ref_logp, estimator="k2").sum(), leaf)
    score = torch.eye(logp.shape[-1], dtype=logp.dtype) - logp.exp().unsqueeze(-2)
    moved = (logp.unsqueeze(-2) - 0.1 * slope.unsqueeze(-1) * score).log_softmax(-1)
    lowered = moved.diagonal(dim1=-2, dim2=-1) < logp
    preferred = ref_logp > logp
    figures = {
        "lowered_where_ref_is_larger": lowered[preferred].double().mean().item(),
        "lowered_where_ref_is_smaller": lowered[~preferred].double().mean().item(),
    }
    share = figures["lowered_where_ref_is_larger"]
    return Finding(settle(share == 1.0, share > 0), figures)


@decides("S4-4")
def one_sample_is_unbiased_and_constrains() -> Finding:
    """Variance of a mean of two samples over all ordered pairs; KL after the same 3200 samples in
    batches of 1 and of 64; and KL under pure reward noise with and without a one-sample term."""
    logits, ref_logits = (x[:1] for x in random_policies(1, 8, spread=1.5, seed=10))
    one = gradient_moments(logits, ref_logits, estimator="k2")
    logp, ref_logp = logits[0].log_softmax(-1), ref_logits[0].log_softmax(-1)
    coefficient = gradient_coefficient(logp, ref_logp, estimator="k2")
    single = coefficient[:, None] * (torch.eye(8, dtype=logp.dtype) - logp.exp())
    two = 0.5 * (single[:, None] + single[None, :])
    weight = logp.exp()[:, None] * logp.exp()[None, :]
    mean = (weight[..., None] * two).sum((0, 1))
    variance = (weight * (two - mean).square().sum(-1)).sum()
    start, reference = logits.expand(60, -1), ref_logits.expand(60, -1)
    after = {}
    for name, batch_size in (("one", 1), ("batch", 64)):
        end = sampled_descent(
            start,
            reference,
            coefficient_of("k2"),
            step_size=0.02 * batch_size,
            steps=1280 // batch_size,
            batch_size=batch_size,
            seed=11,
        )[-1]
        after[name] = reverse_kl(end, reference).median().item()
    begin = reverse_kl(logits, ref_logits).item()
    figures = {
        "bias": (mean - one.mean[0]).abs().max().item(),
        "variance_two_over_one": (variance / one.trace_var[0]).item(),
        "kl_start": begin,
        "kl_after_ones": after["one"],
        "kl_after_batches": after["batch"],
        "kl_noise_free_run": _median_kl("k2", beta=0.0, step_size=0.2),
        "kl_noise_one_sample": _median_kl("k2", beta=1.0, step_size=0.2),
    }
    unconstrained = after["one"] > 0.5 * begin
    useless = figures["kl_noise_one_sample"] > 0.5 * figures["kl_noise_free_run"]
    return Finding(
        settle(unconstrained and useless, figures["bias"] > EXACT or unconstrained or useless),
        figures,
    )


@decides("S4-xv")
def one_sample_with_a_large_step_collapses() -> Finding:
    """KL under pure reward noise with a one-sample k2 term, at a small and at a large step, and at
    the large step with 64 samples."""
    figures = {
        "kl_small_step": _median_kl("k2", beta=1.0, step_size=0.1),
        "kl_large_step": _median_kl("k2", beta=1.0, step_size=3.0),
        "kl_large_step_batch": _median_kl("k2", beta=1.0, step_size=3.0, batch_size=64),
        "kl_collapsed": entropy(uniform(1)).item(),
    }
    collapsed = figures["kl_large_step"] > 0.5 * figures["kl_collapsed"]
    cured = figures["kl_large_step_batch"] < 0.1 * figures["kl_collapsed"]
    return Finding(settle(collapsed and cured, collapsed), figures)


@decides("S4-22")
def k3_noise_against_k2() -> Finding:
    """One sample's gradient covariance, enumerated: random pairs, pairs near their reference, and
    a policy that likes what its reference nearly forbids; then noisy steps of both losses, the
    recorded replica of the figure, and the recorded run on a language model."""
    near = random_policies(300, 16, spread=0.1, seed=12)
    policy = torch.tensor([[0.7, 0.3]], dtype=torch.float64).log()
    forbidden = torch.tensor([[0.0, 14.0]], dtype=torch.float64)
    shares = {
        name: (noise_ratio(*x) > 1).double().mean().item()
        for name, x in (("far", pairs()), ("near", near))
    }
    figures = {
        "noisier_share_far": shares["far"],
        "ratio_far": noise_ratio(*pairs()).median().item(),
        "noisier_share_near": shares["near"],
        "ratio_forbidden": noise_ratio(policy, forbidden).item(),
        "kl_k2_noisy_steps": _median_kl("k2", beta=1.0, step_size=1.0),
        "kl_k3_noisy_steps": _median_kl("k3", beta=1.0, step_size=1.0),
        **_jumps("figure2", 0.04).figures("trained"),
        **_jumps("smollm2_short", 0.3).figures("language"),
    }
    always = min(shares.values()) == 1.0 and figures["ratio_forbidden"] > 1
    return Finding(settle(always, shares["far"] > 0.5), figures)


def _jumps(preset: str, beta: float) -> Interval:
    """Fluctuation of the gradient norm, k3 as a loss less k2, in a recorded run: trained."""
    jumps = fluctuation(recorded(preset).curves, ["gradient_norm"])
    return difference(jumps, "k3_loss", "k2_loss", "gradient_norm", beta=beta)


@decides("S4-23")
def the_published_coefficient_plot() -> Finding:
    """The printed curves on the printed grid against autograd through the losses, where the
    log-prob is one; the share of the grid on which it is not."""
    grid = torch.linspace(-3, 2, steps=400, dtype=torch.float64)
    logp = grid[grid <= 0]
    ref_logp = torch.full_like(logp, -0.7)
    printed = {
        "k2": logp + 0.7,
        "k3": 1 - torch.exp(-0.7 - logp),
        "minimax01": logp.exp() - torch.exp(torch.tensor(-0.7, dtype=torch.float64)),
    }
    leaf = logp.clone().requires_grad_(True)
    errors = []
    for name, curve in printed.items():
        (slope,) = torch.autograd.grad(kl_loss(leaf, ref_logp, estimator=name).sum(), leaf)
        errors.append((slope - curve).abs().max().item())
    k1 = gradient_coefficient(logp, ref_logp, estimator="k1")
    figures = {
        "error": max(errors),
        "share_above_zero": (grid > 0).double().mean().item(),
        "k1_loss_gap": (k1 - printed["k2"]).abs().max().item(),
        "k3_at_minus_3": printed["k3"][0].item(),
        "k3_over_k2_at_minus_3": (printed["k3"][0] / printed["k2"][0]).item(),
    }
    right = figures["error"] < EXACT
    as_drawn = figures["share_above_zero"] == 0 and figures["k1_loss_gap"] < EXACT
    return Finding(settle(right and as_drawn, right), figures)
