"""Chapter 16: what the policy term does: objectives, advantages and lengths, trained."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.optimize import brentq
from torch import Tensor
from torch.func import grad

from analysis.evidence.claims import Finding, claim, judge
from analysis.evidence.names.objectives import AVERAGES
from analysis.evidence.reasoning import Reasoning, open_length_chain
from analysis.evidence.recorded import difference, recorded
from analysis.evidence.training_figures import bands
from analysis.records import designs, initial_policy, statistics
from analysis.records.statistics import Interval
from kl_term import style
from kl_term.kl.credit import credit_moments
from kl_term.kl.sequences import sequence_probability
from kl_term.objectives.advantages import group_normalise
from kl_term.objectives.aggregation import token_weights

# --- What the chapter computes ----------------------------------------------------------------

#: Aggregation -> what it is called; the sum is the policy gradient of the mean reward.
MODES = {"seq_mean_token_sum": "sum", "seq_mean_token_mean": "mean, 1/|o|"}


def row_weights(problem: Reasoning, mode: str) -> Tensor:
    """[N]: the weight that every counted token of a path gets, up to the number of rows."""
    mask = problem.sequences.mask
    return token_weights(mask, mode, dtype=problem.outcome.dtype).amax(dim=-1) * len(mask)


def ascent(problem: Reasoning, mode: str) -> Tensor:
    """[states, vocab]: the expected on-policy gradient of reward minus its mean, so weighted."""
    probability = sequence_probability(problem.logits, problem.sequences)
    advantage = problem.outcome - probability @ problem.outcome
    credit = (row_weights(problem, mode) * advantage)[:, None] * problem.sequences.mask
    return credit_moments(problem.logits, problem.sequences, credit).mean


def by_classes(problem: Reasoning, mode: str) -> Tensor:
    r"""The same by the theorem: :math:`\sum_C a_C \nabla (\Pr(C)\, \mathbb{E}[w \mid C])`.

    By autograd through the two classes, right and wrong, each with the advantage it has.
    """
    right, weights = problem.outcome, row_weights(problem, mode)
    success = sequence_probability(problem.logits, problem.sequences) @ right
    of_path = ((1 - success) * right - success * (1 - right)) * weights
    return grad(lambda at: sequence_probability(at, problem.sequences) @ of_path)(problem.logits)


def mean_length_slope(problem: Reasoning, chosen: Tensor, direction: Tensor) -> float:
    """Change of the mean length of the chosen paths [N] per unit step along a direction."""
    lengths = problem.sequences.mask.sum(dim=-1).to(chosen.dtype)

    def mean_length(at: Tensor) -> Tensor:
        mass = sequence_probability(at, problem.sequences) * chosen
        return mass @ lengths / mass.sum()

    return ((grad(mean_length)(problem.logits) * direction).sum() / direction.norm()).item()


def drift_table(rights: Iterable[float], *, max_steps: int = 7, stop: float = 0.25) -> pd.DataFrame:
    """Which way the lengths of right and of wrong answers go under each weight.

    One row per probability that a step is right and weight: ``success`` of a path, ``wrong`` and
    ``right``, tokens per unit step, and ``error`` of the theorem. A path ends with probability
    ``stop`` at each step.
    """
    rows = []
    for right in rights:
        problem = open_length_chain(max_steps, right=right, stop=stop)
        probability = sequence_probability(problem.logits, problem.sequences)
        for mode, called in MODES.items():
            direction = ascent(problem, mode)
            rows.append(
                {
                    "weight": called,
                    "success": (probability @ problem.outcome).item(),
                    "wrong": mean_length_slope(problem, 1 - problem.outcome, direction),
                    "right": mean_length_slope(problem, problem.outcome, direction),
                    "error": (direction - by_classes(problem, mode)).abs().max().item(),
                }
            )
    return pd.DataFrame(rows)


def tilted(lengths: np.ndarray, mass: np.ndarray, mean: float) -> tuple[float, float]:
    r"""Where k1 as a loss under :math:`1/|o|` leads at a mean length, with free logits.

    The natural flow that descends :math:`\mathbb{E}[1/|o|]` from :math:`\pi_0` is the tilt

    .. math:: \pi_\tau(o) \propto \pi_0(o)\, e^{-\tau / |o|}, \qquad
        \mathrm{KL}(\pi_\tau \Vert \pi_0) = -\tau\, \mathbb{E}_\tau[1/|o|]
        - \log \mathbb{E}_0\big[e^{-\tau / |o|}\big]

    Args:
        lengths, mass: [n], the lengths of the start's answers and their probabilities.
        mean: to be reached, between that of the start and the longest.

    Returns:
        :math:`\tau` and the KL of a whole answer, nats.

    Raises:
        ValueError: no tilt has that mean.
    """
    if not mass @ lengths <= mean < lengths.max():
        raise ValueError(f"mean must be from {mass @ lengths:g} to below {lengths.max():g}")

    def weights(tau: float) -> np.ndarray:
        logs = np.log(mass) - tau / lengths
        return np.exp(logs - logs.max())

    def excess(tau: float) -> float:
        return float(np.average(lengths, weights=weights(tau))) - mean

    longest = 1.0
    while excess(longest) < 0.0:
        longest *= 2.0
    tau = brentq(excess, 0.0, longest, xtol=1e-12) if excess(0.0) < 0.0 else 0.0
    share = weights(tau) / weights(tau).sum()
    return tau, float((share * (np.log(share) - np.log(mass))).sum())


def flow(means: np.ndarray) -> pd.DataFrame:
    """:func:`tilted` of the recorded starts: per start and mean, ``start``, ``length``, ``kl``."""
    rows = []
    for start, table in initial_policy.recorded_lengths().groupby("start"):
        lengths = table["length"].to_numpy(float)
        mass = table["completions"].to_numpy(float) / table["completions"].sum()
        first = float(mass @ lengths)
        for mean in means[(means > first) & (means < lengths.max())]:
            kl = tilted(lengths, mass, float(mean))[1]
            rows.append({"start": start, "length": mean, "kl": kl})
    return pd.DataFrame(rows)


def walked() -> pd.DataFrame:
    """Length and KL of a whole answer along the runs of k1 alone, means over the starts.

    Lengths are means over a logging window, and so is the KL: that of its first update and that of
    the next window's. A whole answer's KL is that of a token times the mean length.

    Returns:
        One row per way to average tokens and window: ``average``, ``update``, ``length``, ``kl``.
    """
    run = recorded("aggregation_length")
    curves = run.curves[run.curves["variant"].str.startswith("only_k1")]
    means = curves.groupby(["variant", "update"])[["length", "reverse_kl"]].mean().reset_index()
    parts = []
    for variant, windows in means.groupby("variant"):
        per_token = (windows["reverse_kl"] + windows["reverse_kl"].shift(-1)) / 2
        kept = windows.assign(average=str(variant).removeprefix("only_k1_"))
        parts.append(kept.assign(kl=per_token * windows["length"]).dropna(subset=["kl"]))
    return pd.concat(parts, ignore_index=True)[["average", "update", "length", "kl"]]


def spent(along: pd.DataFrame) -> pd.DataFrame:
    """The last rows of :func:`walked` whose mean length a tilt has, with ``least``, its KL."""
    rows = []
    for average, table in along.groupby("average", sort=False):
        curve = flow(table["length"].to_numpy()).groupby("length")["kl"].mean()
        reached = table[table["length"].isin(curve.index)]
        last = reached.iloc[-1]
        rows.append({**last, "average": average, "least": curve[last["length"]]})
    return pd.DataFrame(rows)


# --- What it draws ----------------------------------------------------------------------------


def draw_walk(along: pd.DataFrame) -> Figure:
    """KL of a whole answer over its mean length: runs of k1 alone, and the tilt of the theorem."""
    figure, axes = style.subplots(height=4.2)
    longest = initial_policy.recorded_lengths()["length"].max()
    curve = flow(np.linspace(along["length"].min(), longest - 0.05, 60))
    curve = curve.groupby("length")["kl"].agg(["mean", "min", "max", "size"])
    curve = curve[curve["size"] == curve["size"].max()]
    axes.plot(curve.index, curve["mean"], color="#111111", label="theorem: the tilt of $1/|o|$")
    axes.fill_between(curve.index, curve["min"], curve["max"], color="#111111", alpha=0.12, lw=0)
    for (average, called), look in zip(AVERAGES.items(), style.SERIES[1:], strict=False):
        rows = along[along["average"] == average]
        axes.plot(rows["length"], rows["kl"], **{**look, "linestyle": "none", "label": called})
    axes.set_xlabel("mean length of answers (tokens)")
    axes.set_ylabel("KL of a whole answer\nfrom the start (nats)")
    axes.legend()
    return figure


def draw_lengths() -> Figure:
    """Mean length over training, one panel with a reward, one without, a line an average."""
    run = recorded("aggregation_length")
    figure, panels = style.subplots(1, 2, height=3.9, sharey=False)
    groups = {"$k_1$ alone, no reward": ("only_k1", 1.0), "$k_1$ beside the reward": ("k1", 0.3)}
    middles = run.curves["update"] + run.preset.config.log_every / 2
    curves = run.curves.assign(update=middles)
    for axes, (title, (name, beta)) in zip(panels, groups.items(), strict=True):
        looks = {
            f"{name}_{average}": {**look, "label": called}
            for (average, called), look in zip(AVERAGES.items(), style.SERIES[1:], strict=False)
        }
        bands(axes, curves[curves["beta"] == beta], "length", looks)
        axes.set(title=title, xlabel="update", ylabel="")
    panels[0].set_ylabel("length (tokens)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


# --- The recorded runs and what they are called -----------------------------------------------

RUNS = (
    "objectives",
    "clip_higher",
    "near_ties",
    "length_growth",
    "dapo",
    "process",
    "process_graded",
)
#: Those of the page, by the names of their designs.
DESIGNS = (*RUNS, "aggregation_length", "aggregation_length_112")
#: Variants of ``length_growth`` that differ in how tokens are averaged, and in what brakes length.
WEIGHTS = ("grpo", "token_mean", "token_sum", "dr_grpo")
BRAKES = ("grpo", "linear_price", "relative_reward", "soft_overlong", "stop_loops")


def credited() -> pd.DataFrame:
    """One row per start of ``process`` and ``process_graded``."""
    outcome, graded = (designs.with_derived(recorded(name)) for name in RUNS[-2:])
    return pd.concat([outcome, graded.assign(variant="graded_" + graded["variant"])])


def over_training(
    curves: pd.DataFrame, variant: str, metric: str, *, ratio: bool = False
) -> Interval:
    """Last logging window less the first, or over it, of a variant: over starts."""
    wide = curves[curves["variant"] == variant].pivot(index="seed", columns="update", values=metric)
    first, last = wide.iloc[:, 0], wide.iloc[:, -1]
    change = last / first if ratio else last - first
    return Interval(*map(float, statistics.interval(change.to_numpy())))


# --- The claims it decides --------------------------------------------------------------------

#: Below this share of what a start had, entropy counts as collapsed.
COLLAPSED = 0.5


@claim("S1-13")
def instabilities() -> Finding:
    """Recorded runs: entropy left with the plain clip, what reward noise costs, what collapses.

    What needs no training beside it: how far noise alone drives a group in which nothing differs.
    """
    generator = torch.Generator().manual_seed(0)
    noise = 1e-3 * torch.randn(4096, 8, generator=generator, dtype=torch.float64)
    right_and_wrong = (torch.rand(4096, 8, generator=generator) < 0.5).to(torch.float64)
    clips, ties = recorded("clip_higher"), recorded("near_ties")
    entropy = over_training(clips.curves, "symmetric", "entropy", ratio=True)
    plain = over_training(ties.curves, "group_std", "accuracy")
    noisy = over_training(ties.curves, "group_std_noisy", "accuracy")
    cost = difference(ties.finals, "group_std_noisy", "group_std", "accuracy")
    floored = difference(ties.finals, "std_min_noisy", "std_min", "accuracy")
    figures = {
        "advantage_of_noise": group_normalise(1 + noise).abs().mean().item(),
        "advantage_of_signal": group_normalise(right_and_wrong).abs().mean().item(),
        "advantage_of_noise_clipped": group_normalise(1 + noise, std_min=0.1).abs().mean().item(),
        **entropy.figures("entropy_left"),
        **cost.figures("noise_cost"),
        **floored.figures("noise_cost_floored"),
        **plain.figures("accuracy_change"),
        **noisy.figures("accuracy_change_noisy"),
    }
    collapses, suffers = entropy.high < COLLAPSED, cost.below
    always_unstable, unstable_with_noise = plain.below, noisy.below
    return Finding(
        judge(
            collapses and suffers and always_unstable, collapses or suffers or unstable_with_noise
        ),
        figures,
    )
