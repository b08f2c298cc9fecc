"""Where each KL term lets training stop, by closed forms, exact ascent and samples: chapter 5."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad

from analysis.evidence.claims import (
    EXACT,
    Finding,
    claim,
    judge,
    largest,
    median,
    percentiles,
    share,
)
from analysis.evidence.figure2 import figure2
from analysis.evidence.noise_ratio import noise_ratio
from analysis.evidence.policies import (
    Coefficient,
    lowered,
    normal_draws,
    pairs,
    random_policies,
    single_steps,
)
from analysis.evidence.recorded import difference, recorded
from analysis.records.statistics import Interval
from analysis.records.summaries import fluctuation
from kl_term import style
from kl_term.kl.ascent import Geometry, expected_ascent
from kl_term.kl.divergences import entropy, reverse_kl
from kl_term.kl.enumeration import expected_gradient, gradient_moments
from kl_term.kl.fixed_points import (
    euclidean_optimum,
    forward_kl_optimum,
    penalty_equilibrium,
    reverse_kl_optimum,
)
from kl_term.kl.sequences import (
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_probability,
    token_logp,
)
from kl_term.kl.surrogates import ESTIMATORS, gradient_coefficient, kl_loss
from kl_term.kl.term import KLTerm
from kl_term.objectives.advantages import leave_one_out

# --- Where exact ascent ends -----------------------------------------------------------------

#: Below this probability a token counts as given up at the end of an ascent.
GIVEN_UP = 1e-12

#: Two ends closer than this in every probability are the same end.
SAME_POLICY = 5e-3

#: What each variant is claimed to converge to; the penalties' ends depend on who survives.
OPTIMA: dict[KLTerm, Callable[..., Tensor]] = {
    KLTerm(estimator="k2"): reverse_kl_optimum,
    KLTerm(estimator="k1", placement="reward"): reverse_kl_optimum,
    KLTerm(estimator="k3", weighting="attached"): reverse_kl_optimum,
    KLTerm(estimator="k3"): forward_kl_optimum,
    KLTerm(estimator="k4"): forward_kl_optimum,
    KLTerm(estimator="minimax01"): euclidean_optimum,
}
CLIPPED = KLTerm(estimator="k3_clip")
ENDS = (*OPTIMA, CLIPPED, *(KLTerm(estimator=k, placement="reward") for k in ("k2", "k3")))


class Problems(NamedTuple):
    """Independent one-state problems, one a row."""

    rewards: Tensor  #: [N, V], one a token
    ref_logits: Tensor  #: [N, V]


def random_problems(
    count: int, vocab_size: int, *, spread: float, reward_spread: float, seed: int
) -> Problems:
    """Gaussian reference logits of standard deviation ``spread``, rewards of ``reward_spread``."""
    draws = normal_draws((2, count, vocab_size), seed=seed)
    return Problems(reward_spread * draws[0], spread * draws[1])


def random_starts(problems: Problems, count: int, *, spread: float, seed: int) -> Tensor:
    """[count, N, V] logits: the reference itself, then policies drawn away from it."""
    noise = normal_draws((count, *problems.ref_logits.shape), seed=seed)
    noise[0] = 0.0
    return problems.ref_logits + spread * noise


def ascent_ends(problems: Problems, starts: Tensor, variant: KLTerm, **options: object) -> Tensor:
    """[S, N, V] probabilities where exact ascent ends, from each start; ``options`` of
    :func:`kl_term.kl.ascent.expected_ascent`."""
    rewards, ref_logits = (x.expand_as(starts) for x in problems)
    return expected_ascent(starts, rewards, ref_logits, **variant.at_one_state, **options).exp()


def predicted_ends(problems: Problems, ends: Tensor, variant: KLTerm, *, beta: float) -> Tensor:
    """[S, N, V] probabilities that the closed form gives for one of ``ENDS``.

    Of penalties and clipped k3 the surviving set is read from ``ends``, not the probabilities on
    it.
    """
    if variant in OPTIMA:
        return OPTIMA[variant](*problems, beta=beta).exp().expand_as(ends)
    rewards, ref_logits = (x.expand_as(ends) for x in problems)
    alive = ends > GIVEN_UP
    if variant == CLIPPED:  # beta ref / (lambda - R) on the survivors: their share scales beta
        cut = torch.where(alive, ref_logits.log_softmax(-1), -torch.inf)
        return forward_kl_optimum(rewards / cut.exp().sum(-1, keepdim=True), cut, beta=beta).exp()
    return penalty_equilibrium(
        rewards, ref_logits, alive, beta=beta, estimator=variant.estimator
    ).exp()


def ends_table(
    problems: Problems, starts: Tensor, variants: Iterable[KLTerm] = ENDS, **options: float
) -> pd.DataFrame:
    """Where exact ascent ends, variant by variant, against the closed forms.

    ``share_unique``: the problems whose starts all end at one policy; ``error``: the largest
    disagreement in probability with the closed form; ``given_up``: the tokens that do not survive;
    ``share_below``: the ends with a survivor less likely than under the reference.
    """
    rows, beta = [], options["beta"]
    for variant in variants:
        ends = ascent_ends(problems, starts, variant, **options)
        predicted = predicted_ends(problems, ends, variant, beta=beta)
        survives = ends > GIVEN_UP
        below = survives & (ends < problems.ref_logits.softmax(-1) * (1 - 1e-9))
        rows.append(
            {
                **variant.at_one_state,
                "share_unique": share((ends - ends[:1]).abs().amax((0, -1)) < SAME_POLICY),
                "error": np.nanmax((ends - predicted).abs().numpy()),
                "given_up": share(~survives),
                "share_below": share(below.any(-1)),
                "reward": (ends * problems.rewards).sum(-1).mean().item(),
            }
        )
    return pd.DataFrame(rows)


def tilt_curves(gaps: Tensor, *, beta: float, steps: int) -> pd.DataFrame:
    """How much of its reference probability a token keeps, against how far its reward is behind.

    Two tokens, alike under the reference. A row a law and gap: the worse token's share of its
    reference probability in ``closed`` form and after ``ascent``.
    """
    rewards = torch.stack([torch.zeros_like(gaps), -gaps], dim=-1)
    ref_logits = torch.full_like(rewards, 0.5).log()
    step_size = 0.5 * min(1.0, 1.0 / (beta + gaps.max().item()))
    options = {"beta": beta, "steps": steps, "step_size": step_size}
    frames = []
    for law in LAW_LABELS:
        term = KLTerm(estimator=law)
        ends = ascent_ends(Problems(rewards, ref_logits), ref_logits[None], term, **options)[0]
        closed = OPTIMA[term](rewards, ref_logits, beta=beta).exp()
        columns = {"gap": gaps, "closed": closed[:, 1] / 0.5, "ascent": ends[:, 1] / 0.5}
        frames.append(pd.DataFrame(columns).assign(law=law))
    return pd.concat(frames, ignore_index=True)


def flow_paths(
    variant: KLTerm,
    starts: Tensor,
    ref_logits: Tensor,
    *,
    frames: int,
    growth: float,
    step_size: float,
    geometry: Geometry = "natural",
) -> Tensor:
    """[frames + 1, S, V] probabilities along the exact flow of a variant, with no reward at all.

    Each frame lasts ``growth`` times as long as the one before: the flow is fast first, then slow.
    """
    path = [starts.log_softmax(-1)]
    for frame in range(frames):
        end = expected_ascent(
            path[-1],
            torch.zeros_like(starts),
            ref_logits.expand_as(starts),
            beta=1.0,
            steps=round(growth**frame),
            step_size=step_size,
            geometry=geometry,
            **variant.at_one_state,
        )
        path.append(end)
    return torch.stack(path).exp()


# --- What samples do -------------------------------------------------------------------------


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
    """``beta`` times the coefficient, under advantages of +1 or -1 that carry no information."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(logp: Tensor, ref_logp: Tensor) -> Tensor:
        advantage = 2.0 * torch.randint(2, logp.shape, generator=generator).to(logp.dtype) - 1.0
        return beta * coefficient(logp, ref_logp) - advantage

    return noisy


def centred(coefficient: Coefficient) -> Coefficient:
    """The coefficient less the mean of the batch's other samples: a leave-one-out baseline."""
    return lambda logp, ref_logp: leave_one_out(coefficient(logp, ref_logp))


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
    """Stochastic descent of a KL loss on freshly sampled tokens: log-probs [checkpoints + 1, M, V].

    Args:
        start_logits, ref_logits: [M, V], moved on ``GRID``; rows are independent runs.
        coefficient: what multiplies the score of a sampled token.
        step_size, steps, batch_size, seed: of the descent, and of the tokens that a step samples.
        checkpoints: how many policies to keep after the start, evenly spaced.
        max_norm: a batch's gradient is cut to this length, as trainers clip it.

    Raises:
        ValueError: ``steps`` is no multiple of ``checkpoints``.
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


def entropy_drift(logits: Tensor, *, step_size: float) -> Tensor:
    """Expected change [...] of the entropy in one step of the k1 loss: exact, of second order."""
    after = entropy(single_steps(logits, torch.ones_like(logits), step_size=step_size))
    return (logits.softmax(-1) * after).sum(-1) - entropy(logits)


def walk_table(*, runs: int, steps: int, **descent: float) -> pd.DataFrame:
    """Entropy (nats) of runs that start at a uniform reference: quantiles over seeds by step."""
    start, frames = uniform(runs), []
    for name, coefficient in WALKS.items():
        history = sampled_descent(start, start, coefficient, steps=steps, **descent)
        frames.append(quantiles(entropy(history), steps).assign(walk=name))
    return pd.concat(frames, ignore_index=True)


def quantiles(values: Tensor, last: int) -> pd.DataFrame:
    """Percentiles over runs of [checkpoints + 1, runs], with the position of each checkpoint."""
    position = torch.linspace(0, last, len(values), dtype=values.dtype)
    return pd.DataFrame({"position": position, **percentiles(values)})


def noise_map(resolution: int, vocab_size: int) -> pd.DataFrame:
    """:func:`noise_ratio` by the log-odds of one token, policy (rows) and reference; the others
    share the rest equally."""
    odds = torch.linspace(-7, 7, resolution, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(odds, odds, indexing="ij")).unsqueeze(-1)
    rest = torch.full_like(grid, -math.log(vocab_size - 1)).expand(*grid.shape[:-1], vocab_size - 1)
    ratio = noise_ratio(*torch.cat([grid, rest], dim=-1))
    return pd.DataFrame(ratio, index=odds.tolist(), columns=odds.tolist())


#: Below this share of its reference probability a token is lost, where the plain flow is slow.
LOST = 0.01


#: How an expected gradient is followed: in which geometry, with how many times the step.
FLOWS: dict[str, tuple[Geometry, int]] = {
    "natural flow": ("natural", 1),
    "plain flow": ("plain", 5),  # slower near the edges
}
#: How its samples are: to which length the gradient of a batch is cut, as trainers do.
CLIPS = {"sampled": math.inf, "sampled, clipped": 1.0}
DYNAMICS = (*FLOWS, *CLIPS)


def penalty_paths(
    ref_logits: Tensor, starts: Tensor, estimators: Iterable[str], *, frames: int = 64, seed: int
) -> dict[tuple[str, str], Tensor]:
    """Policies [frames + 1, S, V] under each penalty alone, by estimator and :data:`DYNAMICS`;
    samples less a leave-one-out baseline."""
    growth, step_size, reference = 1.1, 0.1, ref_logits.expand_as(starts)
    per_frame = round(sum(growth**frame for frame in range(frames)) / frames)
    sampling = {"batch_size": 8, "seed": seed, "step_size": step_size}
    sampling |= {"steps": frames * per_frame, "checkpoints": frames}
    paths = {}
    for name in estimators:
        term, penalty = KLTerm(estimator=name, placement="reward"), centred(ESTIMATORS[name])
        for dynamics, (geometry, times_step) in FLOWS.items():
            options = {"frames": frames, "growth": growth, "geometry": geometry}
            options |= {"step_size": times_step * step_size}
            paths[name, dynamics] = flow_paths(term, starts, ref_logits, **options)
        for dynamics, max_norm in CLIPS.items():
            options = {"max_norm": max_norm, **sampling}
            paths[name, dynamics] = sampled_descent(starts, reference, penalty, **options).exp()
    return paths


def survivors_table(paths: dict[tuple[str, str], Tensor], ref_logits: Tensor) -> pd.DataFrame:
    """How many tokens are left at the end of :func:`penalty_paths`, and how near a truncation.

    ``one``: the share of starts that end with one token; ``tokens``: the mean number left;
    ``distance``: from the reference renormalised on the tokens left, median over the ends with more
    than one; ``least``: the least ``pi / ref`` of any token.
    """
    reference = ref_logits.softmax(-1)
    rows = []
    for (estimator, dynamics), path in paths.items():
        policy = path[-1]
        left = policy > LOST * reference
        cut = torch.where(left, reference, 0.0)
        apart = (policy - cut / cut.sum(-1, keepdim=True)).abs().amax(-1)
        rows.append(
            {
                "estimator": estimator,
                "dynamics": dynamics,
                "one": share(left.sum(-1) == 1),
                "tokens": left.double().sum(-1).mean().item(),
                "distance": apart[left.sum(-1) > 1].nanmedian().item(),
                "least": (policy / reference).min().item(),
            }
        )
    return pd.DataFrame(rows)


def simplex_grid(resolution: int, margin: float = 0.1) -> Tensor:
    """[S, 3] logits of evenly spaced policies over three tokens, the outermost near the edges."""
    points = [
        (i + margin, j + margin, resolution - i - j + margin)
        for i in range(resolution + 1)
        for j in range(resolution + 1 - i)
    ]
    return torch.tensor(points, dtype=torch.float64).log().log_softmax(-1)


# --- What it draws ---------------------------------------------------------------------------

#: What each law is called at the end of its line.
LAW_LABELS = {"k2": "$k_2$ loss,\n$k_1$ reward", "k3": "$k_3$ loss", "minimax01": "MiniMax-01"}


#: Lowest tilt drawn: a token that is given up falls through it.
FLOOR = 1e-6


#: Height of an equilateral triangle of side one.
_HEIGHT = np.sqrt(3) / 2


#: How the walks are named at the ends of their lines, and whose look they borrow.
WALK_LOOKS = {
    "k1": style.line("k1", marker="", label="$k_1$ loss"),
    "flipped": style.line("none", marker="", linestyle="--", label="sign flipped"),
    "printed": style.line("minimax01", marker="", linestyle="-.", label="as printed"),
    "k2": style.line("k2", marker="", label="$k_2$ loss"),
}


def plot_tilts(curves: pd.DataFrame, beta: float, ascended: pd.DataFrame) -> Figure:
    """How much of its reference probability a worse token keeps, by law and reward gap."""
    figure, axes = style.subplots(height=4.0)
    for law, place in {"k2": (7.2, 3e-3), "k3": (9.0, 0.2), "minimax01": (1.2, 4e-6)}.items():
        curve, points = (table[table.law == law] for table in (curves, ascended))
        kept = curve.closed.where(curve.closed > 0, FLOOR / 10)
        axes.plot(curve.gap / beta, kept, **style.line(law, marker="", label=LAW_LABELS[law]))
        points = points[points.closed > FLOOR]
        hollow = {"linestyle": "none", "label": "_ascent", "markerfacecolor": "white"}
        look = style.line(law, **hollow, clip_on=False, zorder=4)
        axes.plot(points.gap / beta, points.ascent, **look)
        style.note(axes, LAW_LABELS[law], place, colour=law, va="bottom")
    axes.set(yscale="log", ylim=(FLOOR, 2.0), xlim=(0, (curves.gap / beta).max()))
    axes.set_xlabel(r"how far the token's reward is behind, in units of $\beta$")
    axes.set_ylabel("share of its reference\nprobability kept (log scale)")
    return figure


def plot_flows(
    paths: Mapping[KLTerm, NDArray[np.float64]], reference: NDArray[np.float64]
) -> Figure:
    """Exact flow [frames, starts, 3] of each variant over the policies of three tokens, without
    any reward: lines from dots to a circle for each different end, and the reference [3]."""
    rows = -(-len(paths) // 2)
    figure, panels = style.subplots(rows, 2, height=2.75 * rows)
    hollow = {"markerfacecolor": "white", "markeredgecolor": "#111111", "markeredgewidth": 1.5}
    for axes in panels.flat:
        axes.set_axis_off()
    for axes, (term, path) in zip(panels.flat, paths.items(), strict=False):
        axes.plot([0, 1, 0.5, 0], [0, 0, _HEIGHT, 0], color=style.QUIET, linewidth=1)
        for name, (x, y), align in (
            ("A", (-0.04, -0.02), "right"),
            ("B", (1.04, -0.02), "left"),
            ("C", (0.5, _HEIGHT + 0.03), "center"),
        ):
            axes.annotate(name, (x, y), ha=align, va="bottom" if name == "C" else "center")
        axes.set(aspect="equal", xlim=(-0.12, 1.12), ylim=(-0.08, _HEIGHT + 0.14))
        colour = style.COLOURS[term.estimator]
        points = {"linestyle": "none", "color": colour}
        x, y = _flat(path)
        axes.plot(x, y, color=colour, linewidth=0.9, alpha=0.7)
        axes.plot(x[0], y[0], marker=".", markersize=2.5, **points)
        _, first = np.unique((16 * path[-1]).round(), axis=0, return_index=True)
        axes.plot(*_flat(path[-1][first]), marker="o", markersize=8, zorder=4, **points)
        at = {"marker": "D", "markersize": 6, "zorder": 5, "linestyle": "none"}
        axes.plot(*_flat(reference), **at, **hollow)
        axes.set_title(f"{style.LABELS[term.estimator]} {term.placement}", fontsize="medium")
    return figure


def _flat(policies: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Barycentric to plane coordinates; tokens A, B, C are the corners."""
    return policies[..., 1] + 0.5 * policies[..., 2], _HEIGHT * policies[..., 2]


def plot_walks(table: pd.DataFrame) -> Figure:
    """Entropy of single-sample runs that start at their reference."""
    labels = {"xlabel": "steps, one sampled token each", "ylabel": "entropy (nats)"}
    looks = {"kind": "walk", "looks": WALK_LOOKS, "ylim": (0, None)}
    return style.lines(table, "position", **looks, **labels, **style.P10_TO_P90)


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


# --- What it decides -------------------------------------------------------------------------


@claim("S4-20")
def fixed_points_of_the_kl_terms() -> Finding:
    """Exact ascent from three starts against the closed forms; then over two-token sequences,
    where the k2 loss per token meets a reward for the whole."""
    problems = random_problems(12, 6, spread=0.5, reward_spread=0.5, seed=8)
    starts = random_starts(problems, 3, spread=1.0, seed=9)
    k1_reward = KLTerm(estimator="k1", placement="reward")
    terms = (k1_reward, KLTerm(estimator="k2"), KLTerm(estimator="k3"))
    table = ends_table(problems, starts, terms, beta=1.0, steps=400, step_size=0.6)
    figures = dict(zip(("k1_reward", "k2_loss", "k3_loss"), table.error, strict=True))
    sequences = enumerate_sequences(2, 2)
    ref_table = torch.tensor([[0.5, -0.5], [2.0, -2.0], [0.0, 0.5]], dtype=torch.float64)
    rewards = torch.tensor([0.0, 2.0, 1.0, -1.0], dtype=torch.float64)
    ref_logp = token_logp(ref_table, sequences).sum(-1)
    optimum = reverse_kl_optimum(rewards, ref_logp, beta=1.0).exp()
    ascend = grad(lambda at: sequence_probability(at, sequences) @ rewards)
    for name, level in (("k2_tokens", "token"), ("k2_sequence", "sequence")):
        end, choice = ref_table, {"estimator": "k2", "level": level}
        for _ in range(200):
            descend = expected_sequence_gradient(end, ref_table, sequences, **choice)
            end = end + 3.0 * (ascend(end) - descend)
        figures[name] = largest(sequence_probability(end, sequences) - optimum)
    one_state = table.error.max() < 1e-9
    return Finding(judge(one_state and figures["k2_tokens"] < 1e-6, one_state), figures)


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
    """KL under pure reward noise with a k2 term: a small step, a large one, and that with 64
    samples."""
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
    """One sample's gradient covariance, enumerated, far, near and where the reference nearly
    forbids; noisy steps of both losses; and how the gradient norm fluctuated in recorded runs: a
    ratio of k3's to k2's at equal KL, a difference on a language model."""
    near = random_policies(300, 16, spread=0.1, seed=12)
    policy = torch.tensor([[0.7, 0.3]], dtype=torch.float64).log()
    forbidden = torch.tensor([[0.0, 14.0]], dtype=torch.float64)
    far = noise_ratio(*pairs())
    equal_kl = figure2().set_index("metric").loc["jumps of gradient_norm", [*Interval._fields]]
    jumps = fluctuation(recorded("smollm2_short").curves, ["gradient_norm"])
    language = difference(jumps, "k3_loss", "k2_loss", "gradient_norm", beta=0.3)
    figures = {
        "noisier_share_far": share(far > 1),
        "ratio_far": median(far),
        "noisier_share_near": share(noise_ratio(*near) > 1),
        "ratio_forbidden": noise_ratio(policy, forbidden).item(),
        "kl_k2_noisy_steps": _median_kl("k2", beta=1.0, step_size=1.0),
        "kl_k3_noisy_steps": _median_kl("k3", beta=1.0, step_size=1.0),
        **Interval(*np.exp(equal_kl.to_numpy(float))).figures("equal_kl"),
        **language.figures("language"),
    }
    noisier = figures["noisier_share_far"]
    always = noisier == figures["noisier_share_near"] == 1 < figures["ratio_forbidden"]
    return Finding(judge(always, noisier > 0.5), figures)


@claim("S4-23")
def the_published_coefficient_plot() -> Finding:
    """The printed curves on the printed grid against autograd through the losses."""
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
