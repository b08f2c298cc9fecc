"""What a KL term of one sample holds against rewards that are pure noise."""

from __future__ import annotations

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from analysis.chapters.ch05_fixed_points.coefficients import coefficient_of
from analysis.chapters.ch05_fixed_points.descent import sampled_descent, uniform
from analysis.evidence.claims import EXACT, Finding, claim, judge, largest, median
from analysis.evidence.policies import Coefficient, random_policies, single_steps
from kl_term import style
from kl_term.kl.divergences import entropy, reverse_kl
from kl_term.kl.enumeration import gradient_moments


def with_reward_noise(coefficient: Coefficient, *, beta: float, seed: int) -> Coefficient:
    """``beta`` times the coefficient, under advantages of +1 or -1 that carry no information."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(logp: Tensor, ref_logp: Tensor) -> Tensor:
        advantage = 2.0 * torch.randint(2, logp.shape, generator=generator).to(logp.dtype) - 1.0
        return beta * coefficient(logp, ref_logp) - advantage

    return noisy


def kl_under_noise(estimator: str, *, beta: float, step_size: float, batch_size: int = 1) -> float:
    """Median KL to a uniform reference after 600 noisy steps from it: log 8 is collapse."""
    noisy = with_reward_noise(coefficient_of(estimator), beta=beta, seed=1)
    options = {"step_size": step_size, "steps": 600, "batch_size": batch_size, "seed": 2}
    end = sampled_descent(uniform(60), uniform(60), noisy, **options)[-1]
    return median(reverse_kl(end, uniform(60)))


def plot_anchored(table: pd.DataFrame) -> Figure:
    """KL under pure reward noise against steps, one panel a step size."""
    by_size = table.groupby("step_size")
    figure, panels = style.subplots(1, len(by_size), height=3.9, sharey=True)
    for axes, (size, curves) in zip(panels, by_size, strict=True):
        for term, curve in curves.groupby("term", sort=False):
            style.band(axes, curve, "position", **style.line(str(term), marker=""))
        axes.set(title=f"step {size:g}", ylim=(-0.15, 2.25))
        style.label_line_ends(axes)
    figure.supxlabel("steps, one sampled token each", fontsize="medium")
    panels[0].set_ylabel("reverse KL to the reference\n(nats)")
    return figure


@claim("S4-4")
def one_sample_is_unbiased_and_constrains() -> Finding:
    """Variance of a mean of two samples over all ordered pairs; KL after the same 3200 samples in
    batches of 1 and of 64; and KL under pure reward noise with and without a one-sample term."""
    logits, ref_logits = random_policies(1, 8, spread=1.5, seed=10)
    one = gradient_moments(logits, ref_logits, estimator="k2")
    logp, ref_logp = logits[0].log_softmax(-1), ref_logits[0].log_softmax(-1)
    weights = coefficient_of("k2")(logp, ref_logp)
    single = logp - single_steps(logp, weights, step_size=1.0)  # each token's gradient
    two = 0.5 * (single[:, None] + single[None, :])
    weight = logp.exp()[:, None] * logp.exp()[None, :]
    mean = (weight[..., None] * two).sum((0, 1))
    variance = (weight * (two - mean).square().sum(-1)).sum()
    start, reference = logits.expand(60, -1), ref_logits.expand(60, -1)
    after = {}
    for size in (1, 64):
        options = {"step_size": 0.02 * size, "steps": 1280 // size, "batch_size": size, "seed": 11}
        end = sampled_descent(start, reference, coefficient_of("k2"), **options)[-1]
        after[size] = median(reverse_kl(end, reference))
    begin = reverse_kl(logits, ref_logits).item()
    figures = {
        "bias": largest(mean - one.mean[0]),
        "variance_two_over_one": (variance / one.trace_var[0]).item(),
        "kl_start": begin,
        "kl_after_ones": after[1],
        "kl_after_batches": after[64],
        "kl_noise_free_run": kl_under_noise("k2", beta=0.0, step_size=0.2),
        "kl_noise_one_sample": kl_under_noise("k2", beta=1.0, step_size=0.2),
    }
    unconstrained = after[1] > 0.5 * begin
    useless = figures["kl_noise_one_sample"] > 0.5 * figures["kl_noise_free_run"]
    either = figures["bias"] > EXACT or unconstrained or useless
    return Finding(judge(unconstrained and useless, either), figures)


@claim("S4-xv")
def one_sample_with_a_large_step_collapses() -> Finding:
    """KL under pure reward noise with a k2 term: a small step, a large one, and that with 64
    samples."""
    figures = {
        "kl_small_step": kl_under_noise("k2", beta=1.0, step_size=0.1),
        "kl_large_step": kl_under_noise("k2", beta=1.0, step_size=3.0),
        "kl_large_step_batch": kl_under_noise("k2", beta=1.0, step_size=3.0, batch_size=64),
        "kl_collapsed": entropy(uniform(1)).item(),
    }
    collapsed = figures["kl_large_step"] > 0.5 * figures["kl_collapsed"]
    cured = figures["kl_large_step_batch"] < 0.1 * figures["kl_collapsed"]
    return Finding(judge(collapsed and cured, collapsed), figures)
