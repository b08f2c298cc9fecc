"""Where the KL enters a group, enumerated over every group of answers: chapter 8."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from analysis.experiments.chapters.advantages import group_moments, true_gradient
from analysis.experiments.chapters.gradients import random_policies
from analysis.kl.divergences import reverse_kl
from analysis.kl.enumeration import GradientMoments, relative_error, reverse_kl_gradient
from analysis.kl.scores import expected_score
from analysis.objectives.ordering import ORDERS


class Prompts(NamedTuple):
    """Independent one-token prompts, one a row."""

    logits: Tensor  #: [N, V], the policy, which also samples
    ref_logits: Tensor  #: [N, V]
    rewards: Tensor  #: [N, V], one a token


def random_prompts(count: int, vocab_size: int, *, distance: float, seed: int) -> Prompts:
    """Random references, policies ``distance`` away from them and standard normal rewards."""
    ref_logits, step = random_policies(count, vocab_size, spread=1.0, seed=seed)
    rewards, _ = random_policies(count, vocab_size, spread=1.0, seed=seed + 1)
    return Prompts(ref_logits + distance * step, ref_logits, rewards)


def order_moments(
    prompts: Prompts, order: str, *, beta: float, group_size: int, eps: float = 1e-4
) -> GradientMoments:
    """Exact mean [N, V] and spread [N] of one group's gradient under an order of KL and groups."""
    options = {} if order == "kl_then_leave_one_out" else {"eps": eps}
    rows = []
    for logits, ref_logits, rewards in zip(*prompts, strict=True):
        kl = logits.log_softmax(-1) - ref_logits.log_softmax(-1)

        def advantage(tokens: Tensor, rewards: Tensor = rewards, kl: Tensor = kl) -> Tensor:
            return ORDERS[order](rewards[tokens], kl[tokens], beta=beta, **options)

        rows.append(group_moments(logits, torch.arange(len(logits)), group_size, advantage))
    return GradientMoments(*(torch.stack(x) for x in zip(*rows, strict=True)))


class Weights(NamedTuple):
    """How strongly an order's expected gradient follows each exact gradient."""

    reward: Tensor  #: [N], along the gradient of the mean reward, without a KL
    kl: Tensor  #: [N], along the descent of the KL: what the KL adds, over beta
    bias: Tensor  #: [N], relative error of the reward part after the best rescaling


def order_weights(prompts: Prompts, order: str, *, beta: float, group_size: int) -> Weights:
    """Least-squares weights of an order's expected gradient on the two exact gradients."""
    alone = order_moments(prompts, order, beta=0.0, group_size=group_size).mean
    added = order_moments(prompts, order, beta=beta, group_size=group_size).mean - alone
    reward = true_gradient(prompts.logits, prompts.rewards)
    descent = -reverse_kl_gradient(prompts.logits, prompts.ref_logits)
    scale = (alone * reward).sum(-1) / reward.square().sum(-1)
    basis = torch.stack([reward, descent], dim=-1)
    fitted = torch.linalg.lstsq(basis, added.unsqueeze(-1)).solution.squeeze(-1)
    return Weights(scale, fitted[:, 1] / beta, relative_error(alone / scale.unsqueeze(-1), reward))


def order_table(
    prompts: Prompts,
    scales: Iterable[float],
    *,
    beta: float,
    group_size: int,
    orders: Iterable[str] = ORDERS,
) -> pd.DataFrame:
    """Weights of reward and KL under each order as the rewards are rescaled, as quantiles.

    ``std`` is the exact standard deviation of the reward under the policy; ``effective_beta`` the
    weight of the KL in units of the reward, over beta; ``gain`` its absolute weight over beta.
    """
    rows = []
    for scale in scales:
        scaled = prompts._replace(rewards=scale * prompts.rewards)
        std = _spread(scaled.rewards, scaled.logits.softmax(-1)).median().item()
        for order in orders:
            weights = order_weights(scaled, order, beta=beta, group_size=group_size)
            rows.append(
                {"order": order, "scale": scale, "std": std}
                | _quantiles("effective_beta", weights.kl / weights.reward)
                | _quantiles("gain", weights.kl)
                | {"bias": weights.bias.median().item()}
            )
    return pd.DataFrame(rows)


def population_gradient(prompts: Prompts, order: str, *, beta: float) -> Tensor:
    """[N, V]: the limit of an order for large groups, ``eps = 0``, from exact moments.

    NaN where the spread that the order divides by is zero.
    """
    policy = prompts.logits.softmax(-1)
    kl = prompts.logits.log_softmax(-1) - prompts.ref_logits.log_softmax(-1)
    penalised = prompts.rewards - beta * kl
    credit = {
        "kl_then_normalise": penalised / _spread(penalised, policy).unsqueeze(-1),
        "normalise_then_kl": prompts.rewards / _spread(prompts.rewards, policy).unsqueeze(-1)
        - beta * kl,
        "kl_then_leave_one_out": penalised,
    }[order]
    return expected_score(prompts.logits, policy * credit)


def equal_reward_curves(
    distances: Tensor, *, count: int, vocab_size: int, beta: float, group_size: int, seed: int
) -> pd.DataFrame:
    """Norm of the expected gradient of a group of equal rewards against the KL from the reference.

    ``exact`` is beta times the gradient of the reverse KL. Medians over prompts.
    """
    rows = []
    for distance in distances.tolist():
        prompts = random_prompts(count, vocab_size, distance=distance, seed=seed)
        prompts = prompts._replace(rewards=torch.zeros_like(prompts.rewards))
        kl = reverse_kl(prompts.logits, prompts.ref_logits).median().item()
        exact = beta * reverse_kl_gradient(prompts.logits, prompts.ref_logits)
        rows.append({"order": "exact", "kl": kl} | _quantiles("norm", exact.norm(dim=-1)))
        for order in ORDERS:
            mean = order_moments(prompts, order, beta=beta, group_size=group_size).mean
            rows.append({"order": order, "kl": kl} | _quantiles("norm", mean.norm(dim=-1)))
    return pd.DataFrame(rows)


def _spread(values: Tensor, probability: Tensor) -> Tensor:
    """Standard deviation under the probabilities, over the last axis."""
    mean = (probability * values).sum(-1, keepdim=True)
    return (probability * (values - mean).square()).sum(-1).sqrt()


def _quantiles(name: str, values: Tensor) -> dict[str, float]:
    low, mid, high = torch.quantile(values, torch.tensor([0.1, 0.5, 0.9], dtype=values.dtype))
    return {f"{name}_p10": low.item(), name: mid.item(), f"{name}_p90": high.item()}
