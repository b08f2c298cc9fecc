"""Where each KL term lets training stop: closed forms against exact ascent, chapter 5."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad

from analysis import style
from analysis.chapters.ch05_samples import centred, sampled_descent
from analysis.chapters.claims import Finding, claim, judge, largest, share
from analysis.chapters.policies import normal_draws
from analysis.kl.ascent import Geometry, expected_ascent, token_advantage
from analysis.kl.fixed_points import (
    euclidean_optimum,
    forward_kl_optimum,
    penalty_equilibrium,
    reverse_kl_optimum,
)
from analysis.kl.sequences import (
    Sequences,
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_probability,
    token_logp,
)
from analysis.kl.surrogates import ESTIMATORS
from analysis.kl.term import KLTerm

# --- What it computes

#: Below this probability a token counts as given up at the end of an ascent.
GIVEN_UP = 1e-12

#: Two ends closer than this in every probability are the same end.
SAME_POLICY = 5e-3

Optimum = Callable[..., Tensor]

#: What each variant is claimed to converge to; the penalties' ends depend on who survives.
OPTIMA: dict[KLTerm, Optimum] = {
    KLTerm(estimator="k2"): reverse_kl_optimum,
    KLTerm(estimator="k1", placement="reward"): reverse_kl_optimum,
    KLTerm(estimator="k3", weighting="attached"): reverse_kl_optimum,
    KLTerm(estimator="k3"): forward_kl_optimum,
    KLTerm(estimator="k4"): forward_kl_optimum,
    KLTerm(estimator="minimax01"): euclidean_optimum,
}
PENALTIES = (KLTerm(estimator="k2", placement="reward"), KLTerm(estimator="k3", placement="reward"))
CLIPPED = KLTerm(estimator="k3_clip")
ENDS = (*OPTIMA, CLIPPED, *PENALTIES)


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
    """[S, N, V] probabilities where exact ascent on a variant ends, from each start.

    ``options`` are those of :func:`analysis.kl.ascent.expected_ascent`.
    """
    rewards, ref_logits = (x.expand_as(starts) for x in problems)
    return expected_ascent(starts, rewards, ref_logits, **variant.at_one_state, **options).exp()


def predicted_ends(problems: Problems, ends: Tensor, variant: KLTerm, *, beta: float) -> Tensor:
    """[S, N, V] probabilities that the closed form gives for one of ``ENDS``.

    Penalties and clipped k3 have one equilibrium for each surviving set: the set is read from
    ``ends``, the probabilities on it are not.
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

    Columns: ``share_unique``, the share of problems whose starts all end at the same policy;
    ``error``, the largest disagreement in probability with the closed form, where it has one;
    ``residual``, the largest force left on a token that survives; ``given_up``, the share of
    tokens that do not survive; ``share_below``, the share of ends with a survivor less likely than
    under the reference; ``reward``, the mean reward.
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
                "residual": largest(residual(ends, problems, variant, beta=beta)),
                "given_up": share(~survives),
                "share_below": share(below.any(-1)),
                "reward": (ends * problems.rewards).sum(-1).mean().item(),
            }
        )
    return pd.DataFrame(rows)


def residual(policies: Tensor, problems: Problems, variant: KLTerm, *, beta: float) -> Tensor:
    """[S, N]: the largest ``pi(a) |A(a) - A(b)|`` among surviving tokens; zero at a fixed point."""
    rewards, ref_logits = (x.expand_as(policies) for x in problems)
    advantage = token_advantage(
        policies.log(), rewards, ref_logits, beta=beta, **variant.at_one_state
    )
    policy = torch.where(policies > GIVEN_UP, policies, 0.0)
    alive = torch.where(policy > 0, advantage, 0.0)
    centre = (policy * alive).sum(-1, keepdim=True) / policy.sum(-1, keepdim=True)
    return (policy * (alive - centre)).abs().amax(-1)


def greedy_share(problems: Problems, variant: KLTerm, *, beta: float, steps: int) -> float:
    """Smallest probability of the best token after exact ascent from the reference."""
    ends = ascent_ends(
        problems, problems.ref_logits[None], variant, beta=beta, steps=steps, step_size=1.0
    )
    best = problems.rewards.argmax(-1, keepdim=True)
    return ends[0].gather(-1, best).min().item()


#: The laws of the tilt figure, with the variant that is ascended to check each.
LAWS: dict[str, tuple[KLTerm, Optimum]] = {
    "k2": (KLTerm(estimator="k2"), reverse_kl_optimum),
    "k3": (KLTerm(estimator="k3"), forward_kl_optimum),
    "minimax01": (KLTerm(estimator="minimax01"), euclidean_optimum),
}


def tilt_curves(gaps: Tensor, *, beta: float, best_share: float, steps: int) -> pd.DataFrame:
    """How much of its reference probability a token keeps, against how far its reward is behind.

    For each gap a two-token state: the best token has reference probability ``best_share``.
    Columns ``closed`` and ``ascent`` hold ``pi / ref`` of the other token by the two routes.
    """
    rewards = torch.stack([torch.zeros_like(gaps), -gaps], dim=-1)
    shares = torch.tensor([best_share, 1 - best_share], dtype=gaps.dtype)
    ref_logits = shares.log().expand_as(rewards)
    step_size = 0.5 * min(1.0, 1.0 / (beta + gaps.max().item()))
    options = {"beta": beta, "steps": steps, "step_size": step_size}
    frames = []
    for law, (variant, optimum) in LAWS.items():
        ends = ascent_ends(Problems(rewards, ref_logits), ref_logits[None], variant, **options)[0]
        closed = optimum(rewards, ref_logits, beta=beta).exp()
        kept = {"closed": closed[:, 1] / shares[1], "ascent": ends[:, 1] / shares[1]}
        frames.append(pd.DataFrame({"law": law, "gap": gaps} | kept))
    return pd.concat(frames, ignore_index=True)


def sequence_ascent(
    rewards: Tensor,
    ref_table: Tensor,
    sequences: Sequences,
    *,
    beta: float,
    steps: int,
    step_size: float,
    **choice: str,
) -> Tensor:
    """[N] probabilities of all sequences after plain ascent on ``E[R] - beta KL term``.

    The reward belongs to the whole sequence; ``choice`` says how the KL term is built, as in
    :func:`analysis.kl.sequences.expected_sequence_gradient`. Starts at the reference.
    """
    table = ref_table.clone()
    for _ in range(steps):
        ascend = grad(lambda at: sequence_probability(at, sequences) @ rewards)(table)
        descend = expected_sequence_gradient(table, ref_table, sequences, **choice)
        table = table + step_size * (ascend - beta * descend)
    return sequence_probability(table, sequences)


def sequence_optimum(
    rewards: Tensor, ref_table: Tensor, sequences: Sequences, *, beta: float
) -> Tensor:
    """[N] probabilities of all sequences under :func:`reverse_kl_optimum`, one token a sequence."""
    ref_logp = token_logp(ref_table, sequences).sum(-1)
    return reverse_kl_optimum(rewards, ref_logp, beta=beta).exp()


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

    Each frame lasts ``growth`` times as long as the one before, from one step on: fine where the
    flow is fast, long enough for where it is slow.
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
    ref_logits: Tensor,
    starts: Tensor,
    estimators: Iterable[str],
    *,
    frames: int = 64,
    growth: float = 1.1,
    step_size: float = 0.1,
    batch_size: int = 8,
    seed: int,
) -> dict[tuple[str, str], Tensor]:
    """Policies [frames + 1, S, V] under each penalty alone, by estimator and :data:`DYNAMICS`.

    Sampled runs draw ``batch_size`` tokens a step, less a leave-one-out baseline.
    """
    times = {"frames": frames, "growth": growth}
    per_frame = round(sum(growth**frame for frame in range(frames)) / frames)
    sampling = {"batch_size": batch_size, "seed": seed, "step_size": step_size}
    sampling |= {"steps": frames * per_frame, "checkpoints": frames}
    paths = {}
    for name in estimators:
        term = KLTerm(estimator=name, placement="reward")
        for dynamics, (geometry, times_step) in FLOWS.items():
            options = {"step_size": times_step * step_size, "geometry": geometry, **times}
            paths[name, dynamics] = flow_paths(term, starts, ref_logits, **options)
        reference, penalty = ref_logits.expand_as(starts), centred(ESTIMATORS[name])
        for dynamics, max_norm in CLIPS.items():
            options = {"max_norm": max_norm, **sampling}
            paths[name, dynamics] = sampled_descent(starts, reference, penalty, **options).exp()
    return paths


def survivors_table(paths: dict[tuple[str, str], Tensor], ref_logits: Tensor) -> pd.DataFrame:
    """How many tokens are left at the end of :func:`penalty_paths`, and how near a truncation.

    Columns: ``one``, the share of starts that end with one token; ``tokens``, the mean number
    left; ``distance``, the median distance in probability to the reference renormalised on the
    tokens left, over the ends with more than one; ``least``, the least ``pi / ref`` of any token.
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


# --- What it draws

#: What each law is called at the end of its line.
LAW_LABELS = {"k2": "$k_2$ loss,\n$k_1$ reward", "k3": "$k_3$ loss", "minimax01": "MiniMax-01"}

#: Lowest tilt drawn: a token that is given up falls through it.
FLOOR = 1e-6

#: Height of an equilateral triangle of side one.
_HEIGHT = np.sqrt(3) / 2


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
    any reward, and the reference [3]."""
    named = {
        (t.estimator, f"{style.LABELS[t.estimator]} {t.placement}"): p for t, p in paths.items()
    }
    return _flow_panels(named, reference, height=2.75)


def plot_penalty_dynamics(
    paths: Mapping[tuple[str, str], NDArray[np.float64]], reference: NDArray[np.float64]
) -> Figure:
    """Runs [frames, starts, 3] of two penalties in the reward, by estimator and dynamics, a row a
    dynamics."""
    order = list(dict.fromkeys(dynamics for _, dynamics in paths))
    by_row = sorted(paths, key=lambda key: order.index(key[1]))
    named = {(name, f"{style.LABELS[name]}, {how}"): paths[name, how] for name, how in by_row}
    return _flow_panels(named, reference, height=2.5)


def _flow_panels(
    paths: Mapping[tuple[str, str], NDArray[np.float64]],
    reference: NDArray[np.float64],
    *,
    height: float,
) -> Figure:
    """Two panels a row, each with the colour of an estimator and a title."""
    rows = -(-len(paths) // 2)
    figure, panels = style.subplots(rows, 2, height=height * rows)
    for axes in panels.flat:
        axes.set_axis_off()
    for axes, ((name, title), path) in zip(panels.flat, paths.items(), strict=False):
        _flow(axes, path, reference, style.COLOURS[name])
        axes.set_title(title, fontsize="medium")
    return figure


def _triangle(axes: Axes) -> None:
    axes.plot([0, 1, 0.5, 0], [0, 0, _HEIGHT, 0], color=style.QUIET, linewidth=1)
    for name, (x, y), align in (
        ("A", (-0.04, -0.02), "right"),
        ("B", (1.04, -0.02), "left"),
        ("C", (0.5, _HEIGHT + 0.03), "center"),
    ):
        axes.annotate(name, (x, y), ha=align, va="bottom" if name == "C" else "center")
    axes.set(aspect="equal", xlim=(-0.12, 1.12), ylim=(-0.08, _HEIGHT + 0.14))


def _flow(
    axes: Axes, path: NDArray[np.float64], reference: NDArray[np.float64], colour: str
) -> None:
    """Runs [frames, starts, 3] in a triangle: lines from dots, a circle for each different end."""
    _triangle(axes)
    x, y = _flat(path)
    points = {"linestyle": "none", "color": colour}
    axes.plot(x, y, color=colour, linewidth=0.9, alpha=0.7)
    axes.plot(x[0], y[0], marker=".", markersize=2.5, **points)
    _, first = np.unique((16 * path[-1]).round(), axis=0, return_index=True)
    ends = path[-1][first]  # one circle for equal ends
    axes.plot(*_flat(ends), marker="o", markersize=8, zorder=4, **points)
    hollow = {"markerfacecolor": "white", "markeredgecolor": "#111111", "markeredgewidth": 1.5}
    axes.plot(*_flat(reference), marker="D", markersize=6, zorder=5, linestyle="none", **hollow)


def _flat(policies: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Barycentric to plane coordinates; tokens A, B, C are the corners."""
    return policies[..., 1] + 0.5 * policies[..., 2], _HEIGHT * policies[..., 2]


# --- What it decides


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
    optimum = sequence_optimum(rewards, ref_table, sequences, beta=1.0)
    options = {"beta": 1.0, "steps": 200, "step_size": 3.0, "estimator": "k2"}
    for name, level in (("k2_tokens", "token"), ("k2_sequence", "sequence")):
        end = sequence_ascent(rewards, ref_table, sequences, level=level, **options)
        figures[name] = largest(end - optimum)
    one_state = table.error.max() < 1e-9
    return Finding(judge(one_state and figures["k2_tokens"] < 1e-6, one_state), figures)
