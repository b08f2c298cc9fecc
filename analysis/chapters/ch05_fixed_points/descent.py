"""Descent of a KL loss on sampled tokens."""

from __future__ import annotations

import math

import pandas as pd
import torch
from torch import Tensor

from analysis.evidence.claims import percentiles
from analysis.evidence.policies import Coefficient

#: Spacing of the logits of a descent, in nats. Descent of k1 takes two policies that are 1e-15
#: apart to different runs within a few thousand steps: without a grid the last bit of a processor's
#: ``exp`` would decide where a run ends. On it, every processor computes the same runs.
GRID = 2.0**-18


def sampled_descent(
    start_logits: Tensor,
    ref_logits: Tensor,
    coefficient: Coefficient,
    *,
    step_size: float,
    steps: int,
    seed: int,
    batch_size: int = 1,
    checkpoints: int = 1,
    max_norm: float = math.inf,
) -> Tensor:
    """Stochastic descent of a KL loss on freshly sampled tokens: log-probs [checkpoints + 1, M, V].

    Args:
        start_logits, ref_logits: [M, V], moved on ``GRID``; rows are independent runs.
        coefficient: what multiplies the score of a sampled token.
        step_size, steps, batch_size, seed: of the descent, and of the tokens that a step samples.
        checkpoints: how many policies to keep after the start, evenly spaced.
        max_norm: a batch's gradient is cut to this length, as trainers clip it.

    Raises:
        ValueError: ``steps`` is no multiple of ``checkpoints``.
    """
    if steps % checkpoints:
        raise ValueError(f"steps must be a multiple of checkpoints, got {steps} and {checkpoints}")
    generator = torch.Generator().manual_seed(seed)
    logits = _on_grid(start_logits)
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    kept, runs = [logp], len(logp)
    last = torch.full((runs, 1), logp.shape[-1] - 1)
    for step in range(1, steps + 1):
        policy = logp.exp()
        uniforms = torch.rand(runs, batch_size, generator=generator, dtype=logp.dtype)
        tokens = torch.searchsorted(policy.cumsum(-1), uniforms).minimum(last)
        weight = coefficient(logp.gather(-1, tokens), ref_logp.gather(-1, tokens)) / batch_size
        gradient = -policy * weight.sum(-1, keepdim=True)
        gradient.scatter_add_(-1, tokens, weight)
        gradient *= (max_norm / gradient.norm(dim=-1, keepdim=True)).clamp(max=1.0)
        logits = _on_grid(logits - step_size * gradient)
        logp = logits.log_softmax(-1)
        if step % (steps // checkpoints) == 0:
            kept.append(logp)
    return torch.stack(kept)


def _on_grid(logits: Tensor) -> Tensor:
    return torch.round(logits / GRID) * GRID


def uniform(runs: int) -> Tensor:
    """Logits of so many uniform policies over eight tokens."""
    return torch.zeros(runs, 8, dtype=torch.float64)


def quantiles(values: Tensor, last: int) -> pd.DataFrame:
    """Percentiles over runs of [checkpoints + 1, runs], with the position of each checkpoint."""
    position = torch.linspace(0, last, len(values), dtype=values.dtype)
    return pd.DataFrame({"position": position, **percentiles(values)})
