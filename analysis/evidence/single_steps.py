"""One descent step of a KL loss on one sampled token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: log-probs of the sampled tokens under policy and reference -> coefficient of the score
Coefficient = Callable[[Tensor, Tensor], Tensor]


def single_steps(logits: Tensor, weights: Tensor, *, step_size: float) -> Tensor:
    """[..., V, V] logits after one descent step on each single token, whose score has a weight."""
    score = torch.eye(logits.shape[-1], dtype=logits.dtype) - logits.softmax(-1).unsqueeze(-2)
    return logits.unsqueeze(-2) - step_size * weights.unsqueeze(-1) * score


def lowered(
    logits: Tensor, ref_logits: Tensor, coefficient: Coefficient, *, step_size: float
) -> Tensor:
    """Whether each token's own probability falls in one descent step on that token."""
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    moved = single_steps(logp, coefficient(logp, ref_logp), step_size=step_size).log_softmax(-1)
    return moved.diagonal(dim1=-2, dim2=-1) < logp
