"""DPO on problems small enough to sum over every pair: the numbers of chapter 10."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from analysis.kl.divergences import reverse_kl
from analysis.kl.fixed_points import reverse_kl_optimum
from analysis.objectives.preference import dpo_loss


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
    generator = torch.Generator().manual_seed(seed)
    ref_logits, rewards = torch.randn(2, vocab_size, generator=generator, dtype=torch.float64)
    return Preferences((1.5 * ref_logits).log_softmax(-1), rewards, beta)


def bradley_terry(rewards: Tensor) -> Tensor:
    """[V, V]: probability that the completion of the row is preferred to that of the column."""
    return (rewards[:, None] - rewards[None, :]).sigmoid()


def pair_distributions(problem: Preferences) -> dict[str, Tensor]:
    """[V, V] distributions of the compared pair: who made the data, from near to far.

    Symmetric, zero on the diagonal. ``chain`` compares neighbours only; ``two islands`` never
    compares the first half of the completions with the second.
    """
    size = len(problem.rewards)
    index = torch.arange(size)
    same_half = (index[:, None] < size // 2) == (index[None, :] < size // 2)
    reference, optimum = problem.ref_logp.exp(), problem.optimum.exp()
    shapes = {
        "the optimum's own samples": optimum[:, None] * optimum[None, :],
        "the reference's samples": reference[:, None] * reference[None, :],
        "uniform": torch.ones(size, size, dtype=reference.dtype),
        "what the reference avoids": 1 / (reference[:, None] * reference[None, :]),
        "chain": ((index[:, None] - index[None, :]).abs() == 1).to(reference.dtype),
        "two islands": same_half.to(reference.dtype),
    }
    off_diagonal = 1 - torch.eye(size, dtype=reference.dtype)
    return {name: w * off_diagonal / (w * off_diagonal).sum() for name, w in shapes.items()}


def population_loss(logp: Tensor, problem: Preferences, counts: Tensor) -> Tensor:
    """DPO loss averaged over pairs: ``counts[w, l]`` is the weight of w being preferred to l."""
    size = len(problem.rewards)
    row, column = (x.expand(size, size) for x in (logp[:, None], logp[None, :]))
    ref_row, ref_column = (
        x.expand(size, size) for x in (problem.ref_logp[:, None], problem.ref_logp[None, :])
    )
    losses = dpo_loss(row, column, ref_row, ref_column, beta=problem.beta)
    return (counts * losses).sum()


def labelled(pairs: Tensor, rewards: Tensor) -> Tensor:
    """[V, V] distribution of (preferred, other) when Bradley and Terry's model labels the pairs."""
    return (pairs + pairs.T) * bradley_terry(rewards)


def fit(
    problem: Preferences, counts: Tensor, *, features: Tensor | None = None, ridge: float = 0.0
) -> Tensor:
    """The policy [V] that minimises the DPO loss, by Newton's method from the reference.

    Args:
        problem: reference and beta.
        counts: [V, V], weights of (preferred, other).
        features: [V, D]; log-probs move along ``features @ theta`` only. All of R^V if omitted.
        ridge: on the implicit rewards, for data that separates; 0 for population losses.
    """
    size = len(problem.rewards)
    features = torch.eye(size, dtype=counts.dtype) if features is None else features
    directions = problem.beta * (features[:, None, :] - features[None, :, :]).flatten(0, 1)
    weight = counts.flatten().unsqueeze(-1)
    penalty = ridge * problem.beta**2 * features.T @ features
    theta = torch.zeros(features.shape[-1], dtype=counts.dtype)
    for _ in range(60):
        wrong = (-(directions @ theta)).sigmoid().unsqueeze(-1)
        gradient = penalty @ theta - (weight * wrong * directions).sum(0)
        hessian = penalty + directions.T @ (weight * wrong * (1 - wrong) * directions)
        step = torch.linalg.pinv(hessian, hermitian=True, rtol=1e-13) @ gradient
        theta = theta - step * min(1.0, 2.0 / float((directions @ step).abs().max().clamp(1e-30)))
        if float((directions @ step).abs().max()) < 1e-13:
            break
    return (problem.ref_logp + features @ theta).log_softmax(-1)


def fit_with_sft(problem: Preferences, counts: Tensor, *, weight: float) -> Tensor:
    """Minimiser [V] of the DPO loss plus ``weight`` times the preferred answers' NLL."""
    preferred = counts.sum(-1)

    def loss(logits: Tensor) -> Tensor:
        logp = logits.log_softmax(-1)
        return population_loss(logp, problem, counts) - weight * (preferred * logp).sum()

    return _minimise(loss, problem.ref_logp).log_softmax(-1)


def objective(logp: Tensor, problem: Preferences) -> float:
    """Expected reward less beta times the reverse KL from the reference."""
    value = (logp.exp() * problem.rewards).sum()
    return (value - problem.beta * reverse_kl(logp, problem.ref_logp)).item()


def data_table(problem: Preferences, features: Tensor) -> pd.DataFrame:
    """Where the population DPO loss is minimal, by who made the pairs and what can be learned.

    ``kl`` is that of the fitted policy from the optimum, once over all policies (tabular) and
    once over those that move along the features only, with their objectives.
    """
    rows = []
    for name, pairs in pair_distributions(problem).items():
        counts = labelled(pairs, problem.rewards)
        tabular, limited = fit(problem, counts), fit(problem, counts, features=features)
        rows.append(
            {
                "pairs": name,
                "kl": reverse_kl(tabular, problem.optimum).item(),
                "kl_limited": reverse_kl(limited, problem.optimum).item(),
                "objective": objective(tabular, problem),
                "objective_limited": objective(limited, problem),
            }
        )
    return pd.DataFrame(rows)


def best_limited(problem: Preferences, features: Tensor) -> float:
    """Objective of the best policy that moves along the features only."""

    def loss(theta: Tensor) -> Tensor:
        logp = (problem.ref_logp + features @ theta).log_softmax(-1)
        return reverse_kl(logp, problem.optimum)

    theta = _minimise(loss, torch.zeros(features.shape[-1], dtype=features.dtype))
    return objective((problem.ref_logp + features @ theta).log_softmax(-1), problem)


def sample_counts(
    pairs: Tensor, rewards: Tensor, number: int, *, generator: torch.Generator
) -> Tensor:
    """[V, V] shares of ``number`` sampled and labelled comparisons."""
    size = len(rewards)
    cells = torch.multinomial(
        labelled(pairs, rewards).flatten(), number, replacement=True, generator=generator
    )
    counts = torch.bincount(cells, minlength=size * size).to(rewards.dtype)
    return counts.view(size, size) / number


def finite_data_curves(
    problem: Preferences, numbers: Iterable[int], *, names: Iterable[str], seeds: int
) -> pd.DataFrame:
    """KL of the fitted policy from the optimum against the number of pairs, by who made them.

    A ridge of one pseudo-comparison keeps separated data finite. Returns the 10th, 50th and 90th
    percentile over ``seeds`` data sets.
    """
    distributions = pair_distributions(problem)
    rows = []
    for name in names:
        for number in numbers:
            errors = []
            for seed in range(seeds):
                generator = torch.Generator().manual_seed(seed)
                counts = sample_counts(
                    distributions[name], problem.rewards, number, generator=generator
                )
                fitted = fit(problem, counts, ridge=1 / number)
                errors.append(reverse_kl(fitted, problem.optimum).item())
            low, mid, high = torch.tensor(errors).quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
            rows.append({"pairs": name, "number": number, "p10": low, "median": mid, "p90": high})
    return pd.DataFrame(rows)


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
    theta = torch.zeros(model.features.shape[-1], dtype=torch.float64, requires_grad=True)
    rows = []
    for step in range(steps):
        logp = (model.ref_logp + model.features @ theta).log_softmax(-1)
        loss = dpo_loss(logp[0], logp[1], model.ref_logp[0], model.ref_logp[1], beta=beta)
        chosen, rejected, other = (beta * (logp - model.ref_logp)).tolist()
        rows.append({"step": step, "chosen": chosen, "rejected": rejected, "bystander": other})
        (gradient,) = torch.autograd.grad(loss, theta)
        theta = (theta - rate * gradient).detach().requires_grad_(True)
    return pd.DataFrame(rows)


def chosen_slope(model: SharedFeatures) -> float:
    """Change of the preferred log-prob per unit of DPO's first step along the pair's difference."""
    step = model.features[0] - model.features[1]
    moved = model.features @ step
    return (moved[0] - (model.ref_logp.exp() * moved).sum()).item()


def gradient_of(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Autograd's gradient of a scalar function of a tensor."""
    leaf = at.detach().clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    return gradient


def _minimise(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Minimiser of a smooth convex loss, by L-BFGS from ``start``."""
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
