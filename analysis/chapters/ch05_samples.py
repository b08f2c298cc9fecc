"""One sampled KL gradient at one state, its noise, and descent on many: chapter 5."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad

from analysis import style
from analysis.chapters.ch02_gradients import noise_ratio, pairs
from analysis.chapters.ch19_designed import figure2
from analysis.chapters.claims import (
    EXACT,
    Finding,
    claim,
    difference,
    error_of,
    judge,
    largest,
    median,
    percentiles,
    recorded,
    share,
)
from analysis.chapters.policies import SAME, Policies, random_policies
from analysis.experiments.statistics import Interval
from analysis.experiments.summaries import fluctuation
from analysis.kl.divergences import entropy, reverse_kl
from analysis.kl.enumeration import exact_kl_gradient, expected_gradient, gradient_moments
from analysis.kl.surrogates import gradient_coefficient, kl_loss
from analysis.kl.term import KLTerm

# --- What it computes


#: log-probs of the sampled tokens under policy and reference -> coefficient of the score
Coefficient = Callable[[Tensor, Tensor], Tensor]


def coefficient_of(estimator: str) -> Coefficient:
    """The coefficient that autograd gives the estimator as a loss."""
    return partial(gradient_coefficient, estimator=estimator)


#: Spacing of the logits of a descent, in nats. Descent of k1 takes two policies that are 1e-15
#: apart to different runs within a few thousand steps: without a grid the last bit of a processor's
#: ``exp`` would decide where a run ends. On it, every processor computes the same runs.
GRID = 2.0**-18

#: The k1 loss and its controls; ``printed`` has the extra probability of the seed's equation (26).
WALKS: dict[str, Coefficient] = {
    "k1": coefficient_of("k1"),
    "flipped": lambda logp, ref_logp: -torch.ones_like(logp),
    "printed": lambda logp, ref_logp: logp.exp(),
    "k2": coefficient_of("k2"),
}


def with_reward_noise(coefficient: Coefficient, *, beta: float, seed: int) -> Coefficient:
    """``beta`` times the coefficient, under advantages of +1 or -1 that carry no information.

    With ``beta = 0`` the runs are random walks: what a policy gradient does on pure noise.
    """
    generator = torch.Generator().manual_seed(seed)

    def noisy(logp: Tensor, ref_logp: Tensor) -> Tensor:
        advantage = 2.0 * torch.randint(2, logp.shape, generator=generator).to(logp.dtype) - 1.0
        return beta * coefficient(logp, ref_logp) - advantage

    return noisy


def centred(coefficient: Coefficient) -> Coefficient:
    """The coefficient less the mean of the batch's other samples: a leave-one-out baseline."""

    def less_others(logp: Tensor, ref_logp: Tensor) -> Tensor:
        value, size = coefficient(logp, ref_logp), logp.shape[-1]
        return (value - value.mean(-1, keepdim=True)) * size / (size - 1)

    return less_others


def sampled_descent(
    start_logits: Tensor,
    ref_logits: Tensor,
    coefficient: Coefficient,
    *,
    step_size: float,
    steps: int,
    seed: int,
    batch_size: int = 1,
    checkpoints: int = 1,
    max_norm: float = math.inf,
) -> Tensor:
    """Stochastic descent of a KL loss on freshly sampled tokens, one policy a row.

    Args:
        start_logits, ref_logits: [M, V], moved on ``GRID``; rows are independent runs.
        coefficient: what multiplies the score of a sampled token.
        step_size, steps, batch_size: of the descent, and how many tokens a step samples.
        seed: of the sampled tokens.
        checkpoints: how many policies to keep, evenly spaced; ``steps`` must be a multiple.
        max_norm: a batch's gradient is cut to this length, as trainers clip it.

    Returns:
        [checkpoints + 1, M, V], log-probs, the start first.
    """
    if steps % checkpoints:
        raise ValueError(f"steps must be a multiple of checkpoints, got {steps} and {checkpoints}")
    generator = torch.Generator().manual_seed(seed)
    logits = _on_grid(start_logits)
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    kept, runs = [logp], len(logp)
    last = torch.full((runs, 1), logp.shape[-1] - 1)
    for step in range(1, steps + 1):
        policy = logp.exp()
        uniforms = torch.rand(runs, batch_size, generator=generator, dtype=logp.dtype)
        tokens = torch.searchsorted(policy.cumsum(-1), uniforms).minimum(last)
        weight = coefficient(logp.gather(-1, tokens), ref_logp.gather(-1, tokens)) / batch_size
        gradient = -policy * weight.sum(-1, keepdim=True)
        gradient.scatter_add_(-1, tokens, weight)
        gradient *= (max_norm / gradient.norm(dim=-1, keepdim=True)).clamp(max=1.0)
        logits = _on_grid(logits - step_size * gradient)
        logp = logits.log_softmax(-1)
        if step % (steps // checkpoints) == 0:
            kept.append(logp)
    return torch.stack(kept)


def _on_grid(logits: Tensor) -> Tensor:
    return torch.round(logits / GRID) * GRID


def single_steps(logits: Tensor, weights: Tensor, *, step_size: float) -> Tensor:
    """[..., V, V] logits after one descent step on each single token, whose score has a weight."""
    score = torch.eye(logits.shape[-1], dtype=logits.dtype) - logits.softmax(-1).unsqueeze(-2)
    return logits.unsqueeze(-2) - step_size * weights.unsqueeze(-1) * score


def lowered(
    logits: Tensor, ref_logits: Tensor, coefficient: Coefficient, *, step_size: float
) -> Tensor:
    """Whether each token's own probability falls in one descent step on that token."""
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    moved = single_steps(logp, coefficient(logp, ref_logp), step_size=step_size).log_softmax(-1)
    return moved.diagonal(dim1=-2, dim2=-1) < logp


def share_lowered(
    logits: Tensor, ref_logits: Tensor, coefficient: Coefficient, *, step_size: float
) -> float:
    """Share of all single tokens that are :func:`lowered`."""
    return share(lowered(logits, ref_logits, coefficient, step_size=step_size))


def entropy_drift(logits: Tensor, *, step_size: float) -> Tensor:
    """Expected change [...] of the entropy in one step of the k1 loss: exact, over all tokens.

    The expected gradient is zero, so the drift is of second order in the step size.
    """
    after = entropy(single_steps(logits, torch.ones_like(logits), step_size=step_size))
    return (logits.softmax(-1) * after).sum(-1) - entropy(logits)


def twin_distance(
    coefficient: Coefficient, *, vocab_size: int, runs: int, apart: float, **descent: float
) -> Tensor:
    """Total variation [runs] between the ends of two runs that read the same random numbers.

    One starts at the uniform reference, its twin with a first logit ``apart`` nats higher.
    """
    uniform = torch.zeros(runs, vocab_size, dtype=torch.float64)
    raised = uniform.index_fill(-1, torch.tensor([0]), apart)
    one, twin = (
        sampled_descent(start, uniform, coefficient, **descent)[-1].exp()
        for start in (uniform, raised)
    )
    return 0.5 * (one - twin).abs().sum(-1)


def walk_table(
    walks: Mapping[str, Coefficient], *, vocab_size: int, runs: int, steps: int, **descent: float
) -> pd.DataFrame:
    """Entropy (nats) of runs that start at a uniform reference: quantiles over seeds by step."""
    uniform = torch.zeros(runs, vocab_size, dtype=torch.float64)
    frames = []
    for name, coefficient in walks.items():
        history = sampled_descent(uniform, uniform, coefficient, steps=steps, **descent)
        frames.append(_quantiles(entropy(history), steps).assign(walk=name))
    return pd.concat(frames, ignore_index=True)


def kl_quantiles(history: Tensor, ref_logits: Tensor, last: int) -> pd.DataFrame:
    """Quantiles over runs of the reverse KL (nats) of [checkpoints + 1, M, V], up to ``last``."""
    return _quantiles(reverse_kl(history, ref_logits.expand_as(history)), last)


def _quantiles(values: Tensor, last: int) -> pd.DataFrame:
    """Percentiles over runs of [checkpoints + 1, runs], with the position of each checkpoint."""
    position = torch.linspace(0, last, len(values), dtype=values.dtype)
    return pd.DataFrame({"position": position, **percentiles(values)})


def noise_map(resolution: int, vocab_size: int) -> pd.DataFrame:
    """:func:`noise_ratio` by the log-odds of one token, policy (rows) and reference.

    The other tokens share the rest equally, under both.
    """
    odds = torch.linspace(-7, 7, resolution, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(odds, odds, indexing="ij")).unsqueeze(-1)
    rest = torch.full_like(grid, -math.log(vocab_size - 1)).expand(*grid.shape[:-1], vocab_size - 1)
    ratio = noise_ratio(*torch.cat([grid, rest], dim=-1))
    return pd.DataFrame(ratio, index=odds.tolist(), columns=odds.tolist())


def stale_table(policies: Policies, old_logits: Tensor, terms: Iterable[KLTerm]) -> pd.DataFrame:
    """Per-sample variance of each term's gradient, and the KL whose gradient is its mean, on
    samples of the policy itself and of an older one; medians over the rows.

    A term in the reward has two rows: the policy gradient without its ratio and with it.
    """
    exact = {d: exact_kl_gradient(*policies, direction=d) for d in ("reverse", "forward")}
    rows = []
    for axes in (axes for term in terms for axes in _weighted(term)):
        row: dict[str, object] = {**axes}
        for name, old in (("fresh", policies.logits), ("stale", old_logits)):
            mean, variance = gradient_moments(*policies, old, **axes)
            same = [d for d, g in exact.items() if error_of(mean, g, worst=True) < SAME]
            vanishes = largest(mean.norm(dim=-1)) < SAME
            row[f"{name}_optimises"] = "nothing" if vanishes else (same or ["neither"])[0]
            row[f"{name}_variance"] = median(variance)
        rows.append(row)
    return pd.DataFrame(rows)


def _weighted(term: KLTerm) -> list[dict[str, str]]:
    if term.placement == "loss":
        return [term.at_one_state]
    return [term.at_one_state | {"weighting": weighting} for weighting in ("none", "detached")]


# --- What it draws

#: How the walks are named at the ends of their lines, and whose look they borrow.
WALK_LOOKS = {
    "k1": ("k1", "-", "$k_1$ loss"),
    "flipped": ("none", "--", "sign flipped"),
    "printed": ("minimax01", "-.", "as printed"),
    "k2": ("k2", "-", "$k_2$ loss"),
}


def plot_walks(table: pd.DataFrame) -> Figure:
    """Entropy of single-sample runs that start at their reference."""
    figure, axes = style.subplots(height=3.9)
    for walk, curve in table.groupby("walk", sort=False):
        name, dashes, label = WALK_LOOKS[str(walk)]
        look = style.line(name, marker="", linestyle=dashes, label=label)
        style.band(axes, curve, "position", **look)
    axes.set(xlabel="steps, one sampled token each", ylabel="entropy (nats)")
    axes.set_ylim(0, None)
    style.label_line_ends(axes)
    return figure


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


def plot_noise(table: pd.DataFrame) -> Figure:
    """Where one sample of the k3 loss is noisier than one of the k2 loss, by one token's odds."""
    figure, axes = style.subplots(height=4.4)
    odds, label = table.index.to_numpy(), "variance, $k_3$ loss over\n$k_2$ loss (log scale)"
    style.ratio_mesh(axes, odds, odds, table.to_numpy(), decades=3, cmap="PuOr", label=label)
    axes.plot(odds, odds, color="#111111", linewidth=1, linestyle=":")
    axes.set_aspect("equal")
    axes.set(xlabel="log-odds of a token, reference", ylabel="log-odds of the token, policy")
    return figure


# --- What it decides


def uniform(runs: int) -> Tensor:
    """Logits of so many uniform policies over eight tokens."""
    return torch.zeros(runs, 8, dtype=torch.float64)


def _median_kl(estimator: str, *, beta: float, step_size: float, batch_size: int = 1) -> float:
    """Median KL to a uniform reference after 600 noisy steps from it: log 8 is collapse."""
    noisy = with_reward_noise(coefficient_of(estimator), beta=beta, seed=1)
    options = {"step_size": step_size, "steps": 600, "batch_size": batch_size, "seed": 2}
    end = sampled_descent(uniform(60), uniform(60), noisy, **options)[-1]
    return median(reverse_kl(end, uniform(60)))


@claim("S4-16")
def k1_loss_walks_at_random() -> Finding:
    """Every token's own probability after one step on it, exactly; then 3000 single-sample steps
    of 200 runs, beside the same runs with the sign flipped and with a tenth of the step."""
    k1, runs = WALKS["k1"], 200
    lowest = min(share_lowered(*pairs(), k1, step_size=eta) for eta in (0.1, 1.0, 10.0))
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
        "k1_minus_flipped_ci95": 1.96 * (ends[:2].var(-1).sum() / runs).sqrt().item(),
        "entropy_small_step": ends[2].mean().item(),
    }
    collapses = max(figures["entropy_k1"], figures["entropy_small_step"]) < 0.5 * start
    because_lowered = figures["entropy_flipped"] > 0.9 * start
    return Finding(judge(lowest == 1 and collapses and because_lowered, lowest == 1), figures)


@claim("S4-17")
def the_sign_of_one_k2_step() -> Finding:
    """One descent step of the k2 loss on every token that the reference prefers."""
    falls = lowered(*pairs(), coefficient_of("k2"), step_size=0.1)
    logp, ref_logp = (x.log_softmax(-1) for x in pairs())
    preferred = ref_logp > logp
    figures = {
        "lowered_where_ref_is_larger": share(falls[preferred]),
        "lowered_where_ref_is_smaller": share(falls[~preferred]),
    }
    towards = figures["lowered_where_ref_is_larger"]
    return Finding(judge(towards == 1.0, towards > 0), figures)


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
        "kl_noise_free_run": _median_kl("k2", beta=0.0, step_size=0.2),
        "kl_noise_one_sample": _median_kl("k2", beta=1.0, step_size=0.2),
    }
    unconstrained = after[1] > 0.5 * begin
    useless = figures["kl_noise_one_sample"] > 0.5 * figures["kl_noise_free_run"]
    either = figures["bias"] > EXACT or unconstrained or useless
    return Finding(judge(unconstrained and useless, either), figures)


@claim("S4-xv")
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
    return Finding(judge(collapsed and cured, collapsed), figures)


@claim("S4-22")
def k3_noise_against_k2() -> Finding:
    """One sample's gradient covariance, enumerated: random pairs, pairs near their reference, and
    a policy that likes what its reference nearly forbids; then noisy steps of both losses, the
    recorded replica of the figure, recorded runs at equal KL, and the recorded run on a language
    model."""
    near = random_policies(300, 16, spread=0.1, seed=12)
    policy = torch.tensor([[0.7, 0.3]], dtype=torch.float64).log()
    forbidden = torch.tensor([[0.0, 14.0]], dtype=torch.float64)
    far = noise_ratio(*pairs())
    figures = {
        "noisier_share_far": share(far > 1),
        "ratio_far": median(far),
        "noisier_share_near": share(noise_ratio(*near) > 1),
        "ratio_forbidden": noise_ratio(policy, forbidden).item(),
        "kl_k2_noisy_steps": _median_kl("k2", beta=1.0, step_size=1.0),
        "kl_k3_noisy_steps": _median_kl("k3", beta=1.0, step_size=1.0),
        **_jumps("figure2", 0.04).figures("trained"),
        **_jumps_at_equal_kl().figures("equal_kl"),
        **_jumps("smollm2_short", 0.3).figures("language"),
    }
    noisier = figures["noisier_share_far"]
    always = noisier == figures["noisier_share_near"] == 1 < figures["ratio_forbidden"]
    return Finding(judge(always, noisier > 0.5), figures)


def _jumps(preset: str, beta: float) -> Interval:
    """Fluctuation of the gradient norm, k3 as a loss less k2, in a recorded run: trained."""
    jumps = fluctuation(recorded(preset).curves, ["gradient_norm"])
    return difference(jumps, "k3_loss", "k2_loss", "gradient_norm", beta=beta)


def _jumps_at_equal_kl() -> Interval:
    """The same as a ratio, k3 as a loss over k2, at equal KL on ten starts."""
    table = figure2().set_index("metric")
    ends = table.loc["jumps of gradient_norm", list(Interval._fields)].to_numpy(float)
    return Interval(*np.exp(ends))


@claim("S4-23")
def the_published_coefficient_plot() -> Finding:
    """The printed curves on the printed grid against autograd through the losses, where the
    log-prob is one; the share of the grid on which it is not."""
    grid = torch.linspace(-3, 2, steps=400, dtype=torch.float64)
    logp = grid[grid <= 0]
    ref_logp = torch.full_like(logp, -0.7)
    printed = {
        "k2": logp + 0.7,
        "k3": 1 - torch.exp(ref_logp - logp),
        "minimax01": logp.exp() - ref_logp.exp(),
    }
    slopes = {
        name: grad(lambda at, name=name: kl_loss(at, ref_logp, estimator=name).sum())(logp)
        for name in printed
    }
    figures = {
        "error": max(largest(slopes[name] - curve) for name, curve in printed.items()),
        "share_above_zero": share(grid > 0),
        "k1_loss_gap": largest(coefficient_of("k1")(logp, ref_logp) - printed["k2"]),
        "k3_at_minus_3": printed["k3"][0].item(),
        "k3_over_k2_at_minus_3": (printed["k3"][0] / printed["k2"][0]).item(),
    }
    right = figures["error"] < EXACT
    as_drawn = figures["share_above_zero"] == 0 and figures["k1_loss_gap"] < EXACT
    return Finding(judge(right and as_drawn, right), figures)
