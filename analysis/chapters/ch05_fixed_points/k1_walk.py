"""The random walk of the k1 loss, and its controls."""

from __future__ import annotations

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from analysis.chapters.ch05_fixed_points.coefficients import coefficient_of
from analysis.chapters.ch05_fixed_points.descent import quantiles, sampled_descent, uniform
from analysis.evidence.claims import Finding, claim, judge, largest, share
from analysis.evidence.policies import Coefficient, lowered, pairs, single_steps
from kl_term import style
from kl_term.kl.divergences import entropy
from kl_term.kl.enumeration import expected_gradient
from kl_term.numbers import HALF_WIDTH

#: The k1 loss and its controls; ``printed`` has the extra probability of claim S4-7.
WALKS: dict[str, Coefficient] = {
    "k1": coefficient_of("k1"),
    "flipped": lambda logp, ref_logp: -torch.ones_like(logp),
    "printed": lambda logp, ref_logp: logp.exp(),
    "k2": coefficient_of("k2"),
}

#: How the walks are named at the ends of their lines, and whose look they borrow.
WALK_LOOKS = {
    "k1": style.line("k1", marker="", label="$k_1$ loss"),
    "flipped": style.line("none", marker="", linestyle="--", label="sign flipped"),
    "printed": style.line("minimax01", marker="", linestyle="-.", label="as printed"),
    "k2": style.line("k2", marker="", label="$k_2$ loss"),
}


def walk_table(*, runs: int, steps: int, **descent: float) -> pd.DataFrame:
    """Entropy (nats) of runs that start at a uniform reference: quantiles over seeds by step."""
    start, frames = uniform(runs), []
    for name, coefficient in WALKS.items():
        history = sampled_descent(start, start, coefficient, steps=steps, **descent)
        frames.append(quantiles(entropy(history), steps).assign(walk=name))
    return pd.concat(frames, ignore_index=True)


def entropy_drift(logits: Tensor, *, step_size: float) -> Tensor:
    """Expected change [...] of the entropy in one step of the k1 loss: exact, of second order."""
    after = entropy(single_steps(logits, torch.ones_like(logits), step_size=step_size))
    return (logits.softmax(-1) * after).sum(-1) - entropy(logits)


def plot_walks(table: pd.DataFrame) -> Figure:
    """Entropy of single-sample runs that start at their reference."""
    labels = {"xlabel": "steps, one sampled token each", "ylabel": "entropy (nats)"}
    looks = {"kind": "walk", "looks": WALK_LOOKS, "ylim": (0, None)}
    return style.lines(table, "position", **looks, **labels, **style.P10_TO_P90)


@claim("S4-16")
def k1_loss_walks_at_random() -> Finding:
    """Every token's own probability after one exact step; then 3000 single-sample steps of 200
    runs, with the sign flipped, and with a tenth of the step."""
    k1, runs = WALKS["k1"], 200
    lowest = min(share(lowered(*pairs(), k1, step_size=eta)) for eta in (0.1, 1.0, 10.0))
    signs = torch.tensor([1.0, -1.0, 0.1], dtype=torch.float64).repeat_interleave(runs)[:, None]
    starts = uniform(3 * runs)
    options = {"step_size": 0.1, "steps": 3000, "seed": 3}
    end = sampled_descent(starts, starts, lambda logp, ref_logp: signs, **options)[-1]
    ends = entropy(end).unflatten(0, (3, runs))
    start = entropy(uniform(1)).item()
    figures = {
        "share_lowered": lowest,
        "expected_step": largest(expected_gradient(*pairs(), estimator="k1")),
        "entropy_drift_one_step": entropy_drift(uniform(1), step_size=0.1).item(),
        "entropy_start": start,
        "entropy_k1": ends[0].mean().item(),
        "entropy_flipped": ends[1].mean().item(),
        "k1_minus_flipped_ci95": HALF_WIDTH * (ends[:2].var(-1).sum() / runs).sqrt().item(),
        "entropy_small_step": ends[2].mean().item(),
    }
    collapses = max(figures["entropy_k1"], figures["entropy_small_step"]) < 0.5 * start
    because_lowered = figures["entropy_flipped"] > 0.9 * start
    return Finding(judge(lowest == 1 and collapses and because_lowered, lowest == 1), figures)
