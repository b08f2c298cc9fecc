"""Sampling completions for a whole population, and the log-probs under which they were drawn."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from analysis.training.setting import PopulationPolicy, Task, Weights


class Rollout(NamedTuple):
    """Completions of one update. M members, P prompts, G completions of each, T tokens."""

    prompts: Tensor  #: [M, P, L]
    inputs: Tensor  #: [M, P, G, T], what the policy reads to predict each completion token
    completions: Tensor  #: [M, P, G, T]
    old_logp: Tensor  #: [M, P, G, T], under the policy that sampled, no gradient
    mask: Tensor  #: [M, P, G, T], True = counted


def token_logp(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    r"""Log-probs [...] of ``tokens`` [...] under ``logits`` [..., V] *at the sampling temperature*.

    .. math:: \log \pi_\theta(a) = \mathrm{logsoftmax}(z / \tau)_a

    The policy is the distribution that is sampled, so the temperature belongs inside.
    """
    logp = torch.log_softmax(logits / temperature, dim=-1)
    return logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def completion_inputs(completions: Tensor, opening: int) -> Tensor:
    """What the policy reads to predict each token: the opening one, then all but the last."""
    start = torch.full_like(completions[..., :1], opening)
    return torch.cat([start, completions[..., :-1]], dim=-1)


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens [...] from probabilities [..., V] and uniforms [...] in [0, 1).

    The last cumulative sum stands for 1, so rounding never selects a token past the end.
    """
    cdf = probs.cumsum(dim=-1)
    threshold = uniforms.unsqueeze(-1) * cdf[..., -1:]
    return (cdf <= threshold).sum(dim=-1).clamp(max=probs.shape[-1] - 1)


@torch.no_grad()
def sample(
    policy: PopulationPolicy,
    weights: Weights,
    task: Task,
    prompts: Tensor,
    uniforms: Tensor,
    temperature: float,
    past: Any = None,
) -> Rollout:
    """Sample G completions of each prompt with a key-value cache.

    Args:
        prompts: [M, P, L].
        uniforms: [M, P, G, T] in [0, 1), one per token: the whole randomness of the rollout.
        temperature: divides the logits.
        past: the policy's room for completions, to be filled; by default a new one.
    """
    prefix = policy.prefill(weights, prompts)
    tokens = torch.full_like(uniforms[..., :1], task.opening, dtype=torch.long)
    past = policy.empty_cache(uniforms) if past is None else past
    completions, logps = [], []
    for step in range(uniforms.shape[-1]):
        logits = policy.extend(weights, prefix, tokens, past, step)  # (M, P, G, 1, V)
        logp = torch.log_softmax(logits / temperature, dim=-1)
        tokens = inverse_cdf(logp.exp(), uniforms[..., step : step + 1])
        completions.append(tokens)
        logps.append(logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
    drawn = torch.cat(completions, dim=-1)
    inputs = completion_inputs(drawn, task.opening)
    return Rollout(prompts, inputs, drawn, torch.cat(logps, dim=-1), task.completion_mask(drawn))
