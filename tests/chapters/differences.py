"""Printed forms on a few tokens, differentiated without autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def slope_of(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Central differences by the logits of a function of the probabilities."""
    logits = at.log()
    steps = 1e-6 * torch.eye(len(at), dtype=at.dtype)
    ends = [[function((logits + side * s).softmax(-1)) for side in (1, -1)] for s in steps]
    return torch.stack([up - down for up, down in ends]) / 2e-6


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL of two lists of probabilities, nats."""
    return (p * (p / q).log()).sum()
