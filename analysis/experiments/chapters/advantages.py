"""What the group does to the reward, enumerated over every group: the numbers of chapter 9."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from analysis.kl.credit import weighted_moments
from analysis.kl.enumeration import GradientMoments, cosine
from analysis.objectives.advantages import group_centre, group_normalise, leave_one_out
from analysis.objectives.difficulty import (
    arcsine_objective,
    difficulty_weight,
    normalised_objective,
)
from analysis.objectives.lengths import length_penalty

Advantage = Callable[[Tensor], Tensor]

#: Advantages by the name the chapter calls them.
ADVANTAGES: dict[str, Advantage] = {
    "reward itself": lambda rewards: rewards,
    "minus the mean": group_centre,
    "minus the others' mean": leave_one_out,
    "normalised": group_normalise,
}


def random_bandits(count: int, vocab_size: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """One-step problems: logits and rewards in [0, 1], both [count, vocab]."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(count, vocab_size, generator=generator, dtype=torch.float64)
    return logits, torch.rand(count, vocab_size, generator=generator, dtype=torch.float64)


def true_gradient(logits: Tensor, rewards: Tensor) -> Tensor:
    """Gradient of the expected reward by the logits, [..., V]."""
    policy = logits.softmax(-1)
    return policy * (rewards - (policy * rewards).sum(-1, keepdim=True))


def group_moments(
    logits: Tensor, rewards: Tensor, group_size: int, advantage: Advantage
) -> GradientMoments:
    """Exact mean and spread of a group's gradient: every one of the V^G groups, by probability.

    Args:
        logits: [V], of a one-step policy.
        rewards: [V], of each answer.
        group_size: answers sampled independently.
        advantage: from rewards [..., G] to advantages of that shape.
    """
    vocab = len(logits)
    groups = torch.cartesian_prod(*[torch.arange(vocab)] * group_size).reshape(-1, group_size)
    policy = logits.softmax(-1)
    scores = torch.eye(vocab, dtype=logits.dtype) - policy  # [V, V], row a: e_a - pi
    credit = advantage(rewards[groups]).unsqueeze(-1)
    gradients = (credit * scores[groups]).mean(dim=-2)
    return weighted_moments(policy[groups].prod(-1), gradients)


def baseline_table(
    logits: Tensor, rewards: Tensor, group_sizes: Iterable[int], arms: Iterable[str] = ADVANTAGES
) -> pd.DataFrame:
    """Each advantage's expected gradient against the true one, over several problems.

    ``factor`` is the length along the true gradient (median), ``factor_spread`` its range over the
    problems, ``angle`` the largest angle to the true gradient in degrees, ``noise`` the median
    number of groups for a signal-to-noise ratio of one, relative to the reward itself.
    """
    exact = true_gradient(logits, rewards)
    rows = []
    for size in group_sizes:
        noise_of_reward = None
        for name in arms:
            moments = [
                group_moments(z, r, size, ADVANTAGES[name])
                for z, r in zip(logits, rewards, strict=True)
            ]
            mean = torch.stack([m.mean for m in moments])
            noise = torch.stack([m.trace_var for m in moments]) / mean.square().sum(-1)
            noise_of_reward = noise if noise_of_reward is None else noise_of_reward
            factor = (mean * exact).sum(-1) / exact.square().sum(-1)
            angle = cosine(mean, exact).clamp(-1, 1).acos().rad2deg()
            rows.append(
                {
                    "advantage": name,
                    "group_size": size,
                    "factor": factor.median().item(),
                    "factor_spread": (factor.max() - factor.min()).item(),
                    "angle": angle.max().item(),
                    "noise": (noise / noise_of_reward).median().item(),
                }
            )
    return pd.DataFrame(rows)


def baseline_variance(success: float, advantage: Advantage, group_size: int) -> float:
    """Trace of the covariance of a group's gradient with one right answer in two."""
    logits = torch.tensor([success, 1 - success], dtype=torch.float64).log()
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    return group_moments(logits, rewards, group_size, advantage).trace_var.item()


def variance_curves(success: Tensor, group_size: int) -> pd.DataFrame:
    """Variance of the gradient with the others' mean as baseline over that without baseline."""
    rows = [
        {
            "success": p,
            "ratio": baseline_variance(p, leave_one_out, group_size)
            / baseline_variance(p, ADVANTAGES["reward itself"], group_size),
        }
        for p in success.tolist()
    ]
    return pd.DataFrame(rows)


def difficulty_curves(success: Tensor, group_sizes: Iterable[int], *, eps: float) -> pd.DataFrame:
    """Weight of a prompt and objective ascended, by group size; ``inf`` marks the limit."""
    frames = []
    for size in group_sizes:
        weight = difficulty_weight(success, size, ddof=0, eps=eps)
        objective = normalised_objective(success, size, ddof=0, eps=eps)
        frames.append(_difficulty_frame(success, size, weight, objective))
    limit = 1 / (success * (1 - success)).sqrt()
    frames.append(_difficulty_frame(success, torch.inf, limit, arcsine_objective(success)))
    return pd.concat(frames, ignore_index=True)


def weight_table(success: Iterable[float], group_sizes: Iterable[int]) -> pd.DataFrame:
    """The closed-form weight of a prompt against an enumeration of every group.

    The policy has two right and two wrong answers of unequal probability. ``error`` is the largest
    difference of the enumerated gradient from ``weight`` times the gradient of the success
    probability.
    """
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    rows = []
    for size in group_sizes:
        for p in success:
            answers = torch.tensor([0.7 * p, 0.3 * p, 0.8 * (1 - p), 0.2 * (1 - p)]).double()
            logits = answers.log()
            mean = group_moments(logits, rewards, size, group_normalise).mean
            right = (logits.softmax(-1) * rewards).sum()
            weight = difficulty_weight(right, size)
            error = (mean - weight * true_gradient(logits, rewards)).abs().max()
            rows.append(
                {"group_size": size, "success": p, "weight": weight.item(), "error": error.item()}
            )
    return pd.DataFrame(rows)


def noise_groups() -> dict[str, Tensor]:
    """Groups of four whose rewards differ by noise, by a little, and by right and wrong."""
    groups = {
        "rounding": [0.99999, 1.00001, 0.99999, 1.00001],
        "a reward model's noise": [0.70, 0.71, 0.69, 0.70],
        "right and wrong": [0.0, 1.0, 0.0, 1.0],
    }
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in groups.items()}


def amplification_table() -> pd.DataFrame:
    """Largest advantage of each group under each way of dividing."""
    divisions = {
        "std": partial(group_normalise, eps=0.0),
        "std, ddof 0": partial(group_normalise, eps=0.0, ddof=0),
        "std + 1e-4": group_normalise,
        "clipped at 0.1": partial(group_normalise, eps=0.0, std_min=0.1),
        "nothing": group_centre,
    }
    rows = [
        {"group": name, **{how: divide(r).abs().max().item() for how, divide in divisions.items()}}
        for name, r in noise_groups().items()
    ]
    return pd.DataFrame(rows)


def textbook_normalise(rewards: Tensor, *, eps: float) -> Tensor:
    """The formula as printed, in the dtype it is given: what an implementation must not do."""
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + eps)


def equal_rewards_table(value: float, sizes: Iterable[int]) -> pd.DataFrame:
    """Largest advantage in groups of *equal* float32 rewards, by the printed formula and here."""
    rows = []
    for size in sizes:
        rewards = torch.full((size,), value, dtype=torch.float32)
        row: dict[str, float] = {"group_size": size}
        for name, eps in (("no eps", 0.0), ("eps 1e-8", 1e-8), ("eps 1e-4", 1e-4)):
            row[name] = textbook_normalise(rewards, eps=eps).abs().max().item()
        row["here"] = group_normalise(rewards, eps=0.0).abs().max().item()
        rows.append(row)
    return pd.DataFrame(rows)


def length_curves(rewards: Tensor, lengths: Tensor, weights: Tensor) -> pd.DataFrame:
    """Normalised advantage of each completion of a group, by the price of a token."""
    frames = []
    for weight in weights.tolist():
        advantages = group_normalise(length_penalty(rewards, lengths, weight=weight), eps=0.0)
        frames.append(
            pd.DataFrame(
                {
                    "weight": weight,
                    "reward": rewards.numpy(),
                    "length": lengths.numpy(),
                    "advantage": advantages.numpy(),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def _difficulty_frame(
    success: Tensor, size: float, weight: Tensor, objective: Tensor
) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "group_size": size,
            "success": success.numpy(),
            "weight": weight.numpy(),
            "objective": objective.numpy(),
        }
    )
