"""Sampling completions for many members at once, and the log-probs under which they were drawn."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from analysis.kl.truncation import keep_top, masked_logits
from analysis.training.setting import PopulationPolicy, Task, Weights


class Rollout(NamedTuple):
    """Completions of one update. M members, P prompts, G completions of each, T tokens."""

    prompts: Tensor  #: [M, P, L]
    inputs: Tensor  #: [M, P, G, T], what the policy reads to predict each completion token
    completions: Tensor  #: [M, P, G, T]
    old_logp: Tensor  #: [M, P, G, T], under the weights that sampled, no gradient
    mask: Tensor  #: [M, P, G, T], True = counted
    #: [M, P, G, T], under the distribution that was drawn from; ``old_logp`` itself unless the
    #: sampler's temperature or top-p differ from the trainer's.
    sampler_logp: Tensor
    #: [M, P, G, T, V], the tokens that top-p left to the sampler; [..., 1] where it left all.
    keep: Tensor


class Drawing(NamedTuple):
    """How tokens are drawn from a policy's logits at the run's temperature."""

    temperature: float = 1.0  #: of the sampler over the run's
    top_p: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Is the distribution that is drawn from the policy itself?"""
        return self == PLAIN


PLAIN = Drawing()


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
    *,
    drawing: Drawing = PLAIN,
    forced: Tensor | None = None,
) -> Rollout:
    """Sample G completions of each prompt with a key-value cache.

    Args:
        prompts: [M, P, L].
        uniforms: [M, P, G, T] in [0, 1), one per token: the whole randomness of the rollout.
        temperature: divides the logits.
        past: the policy's room for completions, to be filled; by default a new one.
        drawing: how the sampler's distribution differs from the policy's.
        forced: [M, P, G, T], tokens that are already there; -1 where one is to be drawn.
    """
    prefix = policy.prefill(weights, prompts)
    tokens = torch.full_like(uniforms[..., :1], task.opening, dtype=torch.long)
    past = policy.empty_cache(uniforms) if past is None else past
    completions, logps, drawn_logps, kept = [], [], [], []
    for step in range(uniforms.shape[-1]):
        logits = policy.extend(weights, prefix, tokens, past, step) / temperature  # (M, P, G, 1, V)
        logp = torch.log_softmax(logits, dim=-1)
        drawn_logp = logp
        if not drawing.is_plain:
            drawn = logits / drawing.temperature
            kept.append(keep_top(drawn, top_p=drawing.top_p))
            drawn_logp = torch.log_softmax(masked_logits(drawn, kept[-1]), dim=-1)
        tokens = inverse_cdf(drawn_logp.exp(), uniforms[..., step : step + 1])
        if not drawing.is_plain:
            tokens = torch.minimum(tokens, _last_kept(kept[-1]))
        if forced is not None:
            given = forced[..., step : step + 1]
            tokens = torch.where(given < 0, tokens, given)
        completions.append(tokens)
        logps.append(_of_tokens(logp, tokens))
        drawn_logps.append(_of_tokens(drawn_logp, tokens))
    drawn = torch.cat(completions, dim=-1)
    old_logp = torch.cat(logps, dim=-1)
    return Rollout(
        prompts,
        completion_inputs(drawn, task.opening),
        drawn,
        old_logp,
        task.completion_mask(drawn),
        old_logp if drawing.is_plain else torch.cat(drawn_logps, dim=-1),
        torch.cat(kept, dim=-2) if kept else torch.ones_like(drawn, dtype=torch.bool).unsqueeze(-1),
    )


def _last_kept(keep: Tensor) -> Tensor:
    """The last index [...] of a mask [..., V]: rounding must not draw past it."""
    return keep.shape[-1] - 1 - keep.flip(-1).to(torch.uint8).argmax(dim=-1)


def _of_tokens(logp: Tensor, tokens: Tensor) -> Tensor:
    return logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
