"""DPO, from data that it does not choose: every pair of a small problem, summed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad

from analysis.evidence.claims import EXACT, Finding, claim, judge, largest, median
from analysis.evidence.policies import normal_draws
from kl_term import style
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.fixed_points import reverse_kl_optimum
from kl_term.objectives.mirror_descent import log_partition
from kl_term.objectives.preference import dpo_gradient_weight, dpo_loss, implicit_reward

#: Who made the compared pairs: the two that claims set against each other.
NEAR, AVOIDED = "the optimum's own samples", "what the reference avoids"


class Preferences(NamedTuple):
    """One prompt: a reference over V completions and the reward behind the preferences."""

    ref_logp: Tensor  #: [V]
    rewards: Tensor  #: [V], up to a constant
    beta: float

    @property
    def optimum(self) -> Tensor:
        """[V], log-probs of the maximiser of reward less beta times the KL from the reference."""
        return reverse_kl_optimum(self.rewards, self.ref_logp, beta=self.beta)


def random_preferences(vocab_size: int, *, beta: float, seed: int) -> Preferences:
    """A reference far from uniform and rewards of standard deviation one."""
    ref_logits, rewards = normal_draws((2, vocab_size), seed=seed)
    return Preferences((1.5 * ref_logits).log_softmax(-1), rewards, beta)


def bradley_terry(rewards: Tensor) -> Tensor:
    """[V, V]: probability that the completion of the row is preferred to that of the column."""
    return (rewards[:, None] - rewards).sigmoid()


def pair_distributions(problem: Preferences) -> dict[str, Tensor]:
    """[V, V] distributions of the compared pair: who made the data, from near to far.

    ``chain`` compares neighbours only; ``two islands`` never compares across the halves.
    """
    index = torch.arange(len(problem.rewards))
    first_half = index < len(index) // 2
    policies = problem.optimum.exp(), problem.ref_logp.exp()
    optimum, reference = (torch.outer(policy, policy) for policy in policies)
    shapes = {
        NEAR: optimum,
        "the reference's samples": reference,
        "uniform": torch.ones_like(reference),
        AVOIDED: 1 / reference,
        "chain": ((index[:, None] - index).abs() == 1).to(reference.dtype),
        "two islands": (first_half[:, None] == first_half).to(reference.dtype),
    }
    return {name: w.fill_diagonal_(0) / w.sum() for name, w in shapes.items()}


def population_loss(logp: Tensor, problem: Preferences, counts: Tensor) -> Tensor:
    """DPO loss averaged over pairs: ``counts[w, l]`` is the weight of w being preferred to l."""
    preferred, other, ref_preferred, ref_other = (
        side for x in (logp, problem.ref_logp) for side in torch.broadcast_tensors(x[:, None], x)
    )
    return (counts * dpo_loss(preferred, other, ref_preferred, ref_other, beta=problem.beta)).sum()


def labelled(pairs: Tensor, rewards: Tensor) -> Tensor:
    """[V, V] distribution of (preferred, other) when Bradley and Terry's model labels the pairs."""
    return (pairs + pairs.T) * bradley_terry(rewards)


def along(ref_logp: Tensor, features: Tensor, theta: Tensor) -> Tensor:
    """[V]: the policy that moves from the reference by ``theta`` [D] along features [V, D]."""
    return (ref_logp + features @ theta).log_softmax(-1)


def fit(
    problem: Preferences, counts: Tensor, *, features: Tensor | None = None, ridge: float = 0.0
) -> Tensor:
    """The policy [V] that minimises the DPO loss of weights [V, V], by Newton's method.

    It moves from the reference, along ``features @ theta`` only if given, [V, D]; a ridge on the
    implicit rewards keeps data finite that separates.
    """
    features = torch.eye(len(counts), dtype=counts.dtype) if features is None else features
    directions = problem.beta * (features[:, None, :] - features[None, :, :]).flatten(0, 1)
    weight = counts.flatten().unsqueeze(-1)
    penalty = ridge * problem.beta**2 * features.T @ features
    theta = torch.zeros(features.shape[-1], dtype=counts.dtype)
    for _ in range(60):
        wrong = (-(directions @ theta)).sigmoid().unsqueeze(-1)
        gradient = penalty @ theta - (weight * wrong * directions).sum(0)
        hessian = penalty + directions.T @ (weight * wrong * (1 - wrong) * directions)
        step = torch.linalg.pinv(hessian, hermitian=True, rtol=1e-13) @ gradient
        moved = float((directions @ step).abs().max())
        theta = theta - step * min(1.0, 2.0 / max(moved, 1e-30))
        if moved < 1e-13:
            break
    return along(problem.ref_logp, features, theta)


def fit_with_sft(problem: Preferences, counts: Tensor, *, weight: float) -> Tensor:
    """Minimiser [V] of the DPO loss plus ``weight`` times the preferred answers' NLL."""

    def loss(logits: Tensor) -> Tensor:
        logp = logits.log_softmax(-1)
        return population_loss(logp, problem, counts) - weight * (counts.sum(-1) * logp).sum()

    return minimise(loss, problem.ref_logp).log_softmax(-1)


def objective(logp: Tensor, problem: Preferences) -> Tensor:
    """[...]: expected reward of policies [..., V] less beta times the reverse KL."""
    kl = reverse_kl(logp, problem.ref_logp.expand_as(logp))
    return logp.exp() @ problem.rewards - problem.beta * kl


def data_table(problem: Preferences, features: Tensor) -> pd.DataFrame:
    """Where the population DPO loss is minimal, by who made the pairs and what can be learned.

    ``kl`` from the optimum and ``objective`` of the policy fitted over all, and (``_limited``) over
    those that move along the features only.
    """
    rows = []
    for name, pairs in pair_distributions(problem).items():
        counts = labelled(pairs, problem.rewards)
        tabular, limited = fit(problem, counts), fit(problem, counts, features=features)
        rows.append(
            {
                "pairs": name,
                "kl": reverse_kl(tabular, problem.optimum).item(),
                "objective": objective(tabular, problem).item(),
                "objective_limited": objective(limited, problem).item(),
            }
        )
    return pd.DataFrame(rows)


def best_limited(problem: Preferences, features: Tensor) -> float:
    """Objective of the best policy that moves along the features only."""
    policy = partial(along, problem.ref_logp, features)
    start = torch.zeros(features.shape[-1], dtype=features.dtype)
    best = minimise(lambda theta: reverse_kl(policy(theta), problem.optimum), start)
    return objective(policy(best), problem).item()


class SharedFeatures(NamedTuple):
    """Three completions whose log-probs share parameters: preferred, other, and a bystander."""

    features: Tensor  #: [3, D]
    ref_logp: Tensor  #: [3]


def bystander(overlap: float) -> SharedFeatures:
    """A bystander that moves ``overlap`` times as far as the preferred completion does."""
    features = torch.tensor([[1.0, 1.0], [0.0, 1.0], [overlap, 0.0]], dtype=torch.float64)
    return SharedFeatures(features, torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log())


def pair_path(model: SharedFeatures, *, beta: float, rate: float, steps: int) -> pd.DataFrame:
    """Implicit rewards of all three while gradient descent on one pair's DPO loss runs."""
    logp = partial(along, model.ref_logp, model.features)
    slope = grad(lambda at: dpo_loss(*logp(at)[:2], *model.ref_logp[:2], beta=beta))
    theta = torch.zeros(model.features.shape[-1], dtype=torch.float64)
    path = []
    for _ in range(steps):
        path.append(beta * (logp(theta) - model.ref_logp))
        theta = theta - rate * slope(theta)
    table = pd.DataFrame(torch.stack(path), columns=["chosen", "rejected", "bystander"])
    return table.rename_axis("step").reset_index()


def chosen_slope(model: SharedFeatures) -> float:
    """Change of the preferred log-prob per unit of DPO's first step along the pair's difference."""
    step = model.features[0] - model.features[1]
    moved = model.features @ step
    return (moved[0] - (model.ref_logp.exp() * moved).sum()).item()


def minimise(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Minimiser of a smooth loss, by L-BFGS from ``start``."""
    leaf = start.detach().clone().requires_grad_(True)
    optimiser = torch.optim.LBFGS(
        [leaf], max_iter=300, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss(leaf)
        value.backward()
        return value

    optimiser.step(closure)
    return leaf.detach()


def plot_data_distributions(
    table: pd.DataFrame, *, best_limited: float, reference: float
) -> Figure:
    """Objective of the DPO minimiser by who made the pairs, with every policy and with few."""
    figure, axes = style.subplots(height=3.9)
    rows = range(len(table))[::-1]
    axes.hlines(rows, table.objective_limited, table.objective, color="#C9C9C9", linewidth=1.5)
    columns = {"objective": "every policy", "objective_limited": "two parameters"}
    for look, (column, name) in zip(style.SERIES, columns.items(), strict=False):
        axes.plot(table[column], rows, **{**look, "linestyle": "none"}, label=name)
    for x, text, dash in (
        (reference, "reference", ":"),
        (best_limited, "best with\ntwo parameters", "--"),
    ):
        style.guide(axes, x=x, linestyle=dash)
        above = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
        style.note(axes, text, (x, 1.01), **above, fontsize=10)
    axes.set_yticks(rows, table.pairs)
    axes.grid(False, axis="y")
    axes.set_xlabel("expected reward less $\\beta$ KL")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize=10)
    return figure


def plot_pair_paths(paths: dict[str, pd.DataFrame]) -> Figure:
    """Implicit rewards of the three completions while one pair's loss falls."""
    figure, panels = style.subplots(1, len(paths), sharey=True, height=3.7)
    for axes, (title, path) in zip(panels, paths.items(), strict=True):
        for look, name in zip(style.SERIES, ("chosen", "rejected", "bystander"), strict=False):
            axes.plot(path.step, path[name], **{**look, "marker": ""}, label=name)
        style.guide(axes, y=0, linestyle="-")
        axes.set_title(title)
    panels[0].set_ylabel("implicit reward\n(change of log-prob times $\\beta$)")
    panels[0].legend(loc="lower left")
    figure.supxlabel("gradient steps", fontsize="medium")
    return figure


@claim("S4-41")
def regularised_optimum() -> Finding:
    """2000 random policies against the identity; the optimum; Bradley and Terry's odds."""
    problem = random_preferences(8, beta=0.5, seed=0)
    policies = (2 * normal_draws((2000, 8), seed=1)).log_softmax(-1)
    optimum, value = problem.optimum, objective(policies, problem)
    normaliser = log_partition(problem.rewards, problem.ref_logp, tau=problem.beta)
    identity = -problem.beta * reverse_kl(policies, optimum.expand_as(policies)) + normaliser
    implied = implicit_reward(optimum, problem.ref_logp, beta=problem.beta)
    errors = {
        "identity_error": largest(value - identity),
        "reward_error": largest(implied + normaliser - problem.rewards),
        "odds_error": largest(bradley_terry(implied) - bradley_terry(problem.rewards)),
    }
    figures = {
        "smallest_loss": (objective(optimum, problem) - value).min().item(),
        "flipped_identity_error": largest(value + identity),
    }
    holds = max(errors.values()) < EXACT and figures["smallest_loss"] > 0
    return Finding(judge(holds, False), errors | figures)


@claim("S4-43")
def dpo_loss_and_gradient() -> Finding:
    """Autograd through the loss against the printed gradient, by the logits of 200 policies."""
    logits, ref_logits = normal_draws((2, 200, 6), seed=0)
    ref_logp, beta = ref_logits.log_softmax(-1), 0.3

    def pair(z: Tensor) -> tuple[Tensor, ...]:
        logp = z.log_softmax(-1)
        return logp[:, 0], logp[:, 1], ref_logp[:, 0], ref_logp[:, 1]

    by_autograd = grad(lambda z: dpo_loss(*pair(z), beta=beta).sum())(logits)
    weight = dpo_gradient_weight(*pair(logits), beta=beta).unsqueeze(-1)
    scores = torch.eye(6, dtype=torch.float64)[:2, None] - logits.softmax(-1)
    printed = -weight * (scores[0] - scores[1])
    shift = logits - ref_logits
    value = torch.log1p((-beta * (shift[:, 0] - shift[:, 1])).exp())
    figures = {
        "value_error": largest(dpo_loss(*pair(logits), beta=beta) - value),
        "gradient_error": largest(by_autograd - printed),
        "flipped_error": largest(by_autograd + printed),
    }
    exact = max(figures["value_error"], figures["gradient_error"]) < EXACT
    return Finding(judge(exact, False), figures)


@claim("S4-44")
def dpo_needs_no_samples_of_the_policy() -> Finding:
    """Minimiser of the population loss under six pair distributions; few parameters; few pairs."""
    problem = random_preferences(6, beta=0.5, seed=0)
    features = normal_draws((6, 2), seed=1)
    table = data_table(problem, features).set_index("pairs")
    number, data = 2000, {}
    for name in (NEAR, AVOIDED):
        weights, kls = labelled(pair_distributions(problem)[name], problem.rewards), []
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            drawn = weights.flatten().multinomial(number, replacement=True, generator=generator)
            counts = torch.bincount(drawn, minlength=weights.numel()).to(weights.dtype) / number
            # a ridge of one pseudo-comparison keeps data finite that separates
            fitted = fit(problem, counts.view_as(weights), ridge=1 / number)
            kls.append(reverse_kl(fitted, problem.optimum))
        data[name] = median(torch.stack(kls))
    figures = {
        "largest_kl_connected": table.kl.drop("two islands").max(),
        "kl_two_islands": table.kl["two islands"],
        "limited_objective_reference": table.objective_limited["the reference's samples"],
        "limited_objective_avoided": table.objective_limited[AVOIDED],
        "limited_objective_optimum": table.objective_limited[NEAR],
        "kl_2000_pairs_near": data[NEAR],
        "kl_2000_pairs_far": data[AVOIDED],
    }
    return Finding(judge(figures["largest_kl_connected"] > EXACT, False), figures)


@claim("S4-xa")
def chosen_and_rejected_fall_together() -> Finding:
    """Gradient descent on one pair, the same data throughout, with and without a bystander."""
    models = {"no_overlap": bystander(0.0), "overlap": bystander(2.0)}
    ends = {
        name: pair_path(model, beta=0.5, rate=0.5, steps=60).iloc[-1]
        for name, model in models.items()
    }
    figures = {
        "chosen_no_overlap": ends["no_overlap"].chosen,
        "chosen_overlap": ends["overlap"].chosen,
        "rejected_overlap": ends["overlap"].rejected,
        **{f"slope_{name}": chosen_slope(model) for name, model in models.items()},
    }
    depends_on_sampler_only = figures["chosen_no_overlap"] * figures["chosen_overlap"] > 0
    both = figures["chosen_overlap"] < 0 < figures["chosen_no_overlap"]
    return Finding(judge(depends_on_sampler_only, both), figures)


@claim("S4-xc")
def sft_term_as_a_remedy() -> Finding:
    """Minimiser with an SFT term on the preferred answers, for pairs from near and from far."""
    problem = random_preferences(6, beta=0.5, seed=0)
    pairs = pair_distributions(problem)
    kls = []
    for name in (NEAR, AVOIDED):
        counts = labelled(pairs[name], problem.rewards)
        fitted = fit(problem, counts), fit_with_sft(problem, counts, weight=0.1)
        kls.append([reverse_kl(policy, problem.optimum).item() for policy in fitted])
    (without_near, near), (without_far, far) = kls
    figures = {"kl_without": max(without_near, without_far), "kl_near": near, "kl_far": far}
    return Finding(judge(max(near, far) < 1e-6, False), figures)
