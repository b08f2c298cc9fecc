"""Completions of many runs, the log-probs under which they were drawn, and what training adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from analysis.training.environment import PopulationPolicy, Task, Weights
from kl_term.kl.truncation import keep_top, masked_logits


class Rollout(NamedTuple):
    """Completions of one update. M runs, P prompts, G completions of each, T tokens."""

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


class SamplingParams(NamedTuple):
    """How tokens are drawn from a policy's logits at the run's temperature."""

    temperature: float = 1.0  #: of the sampler over the run's
    top_p: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Is the distribution that is drawn from the policy itself?"""
        return self == PLAIN


PLAIN = SamplingParams()


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature; themselves at 1, where a pass over the vocabulary is spared."""
    return logits if temperature == 1.0 else logits / temperature


def token_logp(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    r"""Log-probs [...] of ``tokens`` [...] under ``logits`` [..., V] *at the sampling temperature*.

    .. math:: \log \pi_\theta(a) = \mathrm{logsoftmax}(z / \tau)_a

    The policy is the distribution that is sampled, so the temperature belongs inside.
    """
    logp = torch.log_softmax(at_temperature(logits, temperature), dim=-1)
    return logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def completion_inputs(completions: Tensor, bos_token: int) -> Tensor:
    """What the policy reads to predict each token: the token that opens, then all but the last."""
    start = torch.full_like(completions[..., :1], bos_token)
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
    cache: Any = None,
    *,
    params: SamplingParams = PLAIN,
    forced: Tensor | None = None,
) -> Rollout:
    """Sample G completions of each prompt with a key-value cache.

    Args:
        prompts: [M, P, L].
        uniforms: [M, P, G, T] in [0, 1), one per token: the whole randomness of the rollout.
        temperature: divides the logits.
        cache: the policy's room for completions, to be filled; by default a new one.
        params: how the sampler's distribution differs from the policy's.
        forced: [M, P, G, T], tokens that are already there; -1 where one is to be drawn.
    """
    prefix = policy.prefill(weights, prompts)
    tokens = torch.full_like(uniforms[..., :1], task.bos_token, dtype=torch.long)
    cache = policy.empty_cache(uniforms) if cache is None else cache
    completions, logps, drawn_logps, kept = [], [], [], []
    for step in range(uniforms.shape[-1]):
        # Logits are (M, P, G, 1, V).
        logits = policy.extend(weights, prefix, tokens, cache, step)
        logits = at_temperature(logits, temperature)
        logp = torch.log_softmax(logits, dim=-1)
        drawn_logp = logp
        if not params.is_plain:
            drawn = at_temperature(logits, params.temperature)
            kept.append(keep_top(drawn, top_p=params.top_p))
            drawn_logp = torch.log_softmax(masked_logits(drawn, kept[-1]), dim=-1)
        tokens = inverse_cdf(drawn_logp.exp(), uniforms[..., step : step + 1])
        if not params.is_plain:
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
        completion_inputs(drawn, task.bos_token),
        drawn,
        old_logp,
        task.completion_mask(drawn),
        old_logp if params.is_plain else torch.cat(drawn_logps, dim=-1),
        torch.cat(kept, dim=-2) if kept else torch.ones_like(drawn, dtype=torch.bool).unsqueeze(-1),
    )


def _last_kept(keep: Tensor) -> Tensor:
    """The last index [...] of a mask [..., V]: rounding must not draw past it."""
    return keep.shape[-1] - 1 - keep.flip(-1).to(torch.uint8).argmax(dim=-1)


def _of_tokens(logp: Tensor, tokens: Tensor) -> Tensor:
    return logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


class Batch(NamedTuple):
    """A rollout with all that stays fixed while it is trained on; axes [M, P, ...]."""

    rollout: Rollout
    ref_logits: Tensor  #: [M, P, G, T, V], of the reference, at the sampling temperature
    ref_logp: Tensor  #: [M, P, G, T]
    rewards: Tensor  #: [M, P, G], shaped
    outcomes: Tensor  #: [M, P, G], advantage of the whole completion, before any KL
    advantages: Tensor  #: [M, P, G, T], with the KL in the reward folded in
    kept: Tensor  #: [M, P] bool, the groups that the step is a mean over
    trained: Tensor  #: [M, P, G, T] bool, counted tokens that are trained on
    finished: Tensor  #: [M, P, G] bool, False where cut at the longest length
    #: [M, P, G, T, V] and [M, P, G, T], of the teacher; None without one.
    teacher_logits: Tensor | None = None
    teacher_logp: Tensor | None = None
    #: [M, P, G, 1], weight of the distillation on each completion; None without a teacher.
    distillation_weight: Tensor | None = None
    #: [M, P, G, T, V], of the first reference, where others move and KLs are measured; else None.
    first_logits: Tensor | None = None
    #: [M, P, G, 1] bool, completions on which the KL to the reference acts; None = all of all runs.
    kl_on: Tensor | None = None

    def of_runs(self, rows: slice | Tensor) -> Batch:
        """The same for some of the runs; ``rows`` index the first axis."""
        return self._indexed(lambda part: part[rows])

    def of_prompts(self, prompts: slice) -> Batch:
        """The same for some of the prompts."""
        return self._indexed(lambda part: part[:, prompts].contiguous())

    def _indexed(self, index: Callable[[Tensor], Tensor]) -> Batch:
        rollout = Rollout(*(index(part) for part in self.rollout))
        rest = (None if part is None else index(part) for part in self[1:])
        return Batch(rollout, *rest)
