"""Orders of KL and group: what each makes of beta, enumerated over every group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from analysis.evidence.claims import band, median
from analysis.evidence.policies import group_moments, random_policies
from analysis.evidence.stale_states import spread
from kl_term.kl.enumeration import GradientMoments, relative_error, reverse_kl_gradient
from kl_term.kl.scores import expected_score
from kl_term.objectives.ordering import ORDERS


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


def order_moments(prompts: Prompts, order: str, *, beta: float, group_size: int) -> GradientMoments:
    """Exact mean [N, V] and spread [N] of one group's gradient under an order of KL and groups."""
    tokens = torch.arange(prompts.logits.shape[-1])
    moments = []
    for logits, ref_logits, rewards in zip(*prompts, strict=True):
        kl = logits.log_softmax(-1) - ref_logits.log_softmax(-1)

        def advantage(drawn: Tensor, rewards: Tensor = rewards, kl: Tensor = kl) -> Tensor:
            return ORDERS[order](rewards[drawn], kl[drawn], beta=beta)

        moments.append(group_moments(logits, tokens, group_size, advantage))
    return GradientMoments(*(torch.stack(x) for x in zip(*moments, strict=True)))


def order_table(
    prompts: Prompts, scales: Iterable[float], *, beta: float, group_size: int
) -> pd.DataFrame:
    """Weights of reward and KL under each order as the rewards are rescaled: medians over prompts.

    ``std`` is the exact standard deviation of the reward under the policy; ``median``, ``p10`` and
    ``p90`` are of the KL's weight in units of the reward, over beta, by least squares on the two
    exact gradients; ``bias`` is the error of the reward part after the best rescaling.
    """
    policy, rows = prompts.logits.softmax(-1), []
    for scale in scales:
        scaled = prompts._replace(rewards=scale * prompts.rewards)
        std = median(spread(scaled.rewards, policy))
        reward = expected_score(scaled.logits, scaled.logits.softmax(-1) * scaled.rewards)
        descent = -reverse_kl_gradient(scaled.logits, scaled.ref_logits)
        basis = torch.stack([reward, descent], dim=-1)
        for order in ORDERS:
            alone = order_moments(scaled, order, beta=0.0, group_size=group_size).mean
            added = order_moments(scaled, order, beta=beta, group_size=group_size).mean - alone
            of_reward = (alone * reward).sum(-1) / reward.square().sum(-1)
            fitted = torch.linalg.lstsq(basis, added.unsqueeze(-1)).solution.squeeze(-1)
            bias = median(relative_error(alone / of_reward.unsqueeze(-1), reward))
            row = {"order": order, "scale": scale, "std": std, "bias": bias}
            rows.append(row | band(fitted[:, 1] / beta / of_reward))
    return pd.DataFrame(rows)
