r"""Causal attention with grouped queries, and rotary positions.

Rotary positions: each pair of channels turns by an angle that grows with the position,

.. math:: \mathrm{angle}_i(t) = t\, \theta^{-2i/D}, \qquad i < D/2

The pairs are channels i and i + D/2 of a head, the order in which Llama checkpoints are stored.

Source: Su et al. (2021), RoFormer, section 3.2.2.

Shapes: B sequences, K heads of keys and values, R query heads that share one, N rows of a sequence
that ask, S positions that are seen, D channels a head. The R heads of queries are rows of one
product [B, K, R*N, D], so neither keys nor values are repeated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Rows of a bias begin at multiples of so many numbers, else a GPU copies it in every layer.
ALIGNED = 16


def bias_of(visible: Tensor, shared: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, R*N, S]: 0 where a row may look, else minus infinity; ``visible`` is [B, N, S]."""
    bias = torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, -torch.inf)
    aligned = F.pad(bias, (0, -visible.shape[-1] % ALIGNED)).repeat(1, shared, 1).unsqueeze(1)
    return aligned[..., : visible.shape[-1]]


def explicit(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Products and a softmax, the softmax in at least float32; [B, K, R*N, D]."""
    scores = (queries * queries.shape[-1] ** -0.5) @ keys.mT + bias
    dtype = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, dim=-1, dtype=dtype).to(values.dtype) @ values


def fused(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """The same by torch's fused attention."""
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)


class Rotation(NamedTuple):
    """Cosines [..., D] and sines [..., D/2] of the angles at some positions."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """The rotation at integer positions [...]; ``dtype`` is float32 or wider."""
    channels = torch.arange(0, head_dim, 2, device=positions.device).to(dtype)
    inverse = 1.0 / (theta ** (channels / head_dim))  # (D/2,)
    angles = positions.unsqueeze(-1).to(dtype) * inverse
    cos = angles.cos()
    return Rotation(torch.cat([cos, cos], dim=-1), angles.sin())


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Turn heads [..., D]; the rotation must broadcast against them."""
    return _Rotate.apply(x, by)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Rotation) -> Tensor:
        ctx.by = by
        return _turned(x, by, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _turned(gradient, ctx.by, -1.0), None


def _turned(x: Tensor, by: Rotation, direction: float) -> Tensor:
    turned = x * by.cos
    (first, second), (low, high) = x.chunk(2, dim=-1), turned.chunk(2, dim=-1)
    low.addcmul_(second, by.sin, value=-direction)
    high.addcmul_(first, by.sin, value=direction)
    return turned
