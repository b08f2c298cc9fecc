r"""Causal attention with grouped queries, a prompt shared by its completions, and padding.

Rotary positions: each pair of channels turns by an angle that grows with the position,

.. math:: \mathrm{angle}_i(t) = t\, \theta^{-2i/D}, \qquad i < D/2

The pairs are channels i and i + D/2 of a head, the order in which Llama checkpoints are stored.

Source: Su et al. (2021), RoFormer, section 3.2.2.

Shapes: M runs, P prompts, K heads of keys and values, G completions of a prompt, R query heads
that share one head of keys, T queries, S own positions, L prompt tokens, D channels a head. Queries
come as [M, P, K, G, R, T, D]: for the completion's own keys the last two axes before D are rows of
one product, for the shared prompt the last three are. Neither keys nor values are repeated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class KeyValue(NamedTuple):
    """Keys and values of one layer, [M, P, K, G, S, D]; G is 1 for a prompt."""

    keys: Tensor
    values: Tensor


class Visible:
    """Which positions a query may look at, in every layer; every query sees at least itself.

    Args:
        own: [..., T, S] bool, broadcasting against [M, P, 1, 1, 1, T, S].
        prompt: [M, P, L] bool; None where there is no prompt before.
    """

    def __init__(self, own: Tensor, prompt: Tensor | None) -> None:
        self.own, self.prompt = own, prompt
        self._packed: Tensor | None = None

    def packed(self, shape: torch.Size) -> Tensor:
        """[M*P, 1, G*R*T, L + G*S] for queries of a shape; made by the first layer."""
        if self._packed is None:
            runs, prompts, _, groups, shared, steps, _ = shape
            positions = self.own.shape[-1]
            same = torch.eye(groups, dtype=torch.bool, device=self.own.device)
            allowed = self.own.expand(runs, prompts, 1, 1, shared, steps, positions)
            allowed = allowed.squeeze(2).unsqueeze(5) & same[:, None, None, :, None]
            allowed = allowed.reshape(runs, prompts, -1, groups * positions)
            if self.prompt is not None:
                before = self.prompt.unsqueeze(2).expand(-1, -1, allowed.shape[2], -1)
                allowed = torch.cat([before, allowed], dim=-1)
            self._packed = allowed.flatten(0, 1).unsqueeze(1)
        return self._packed


def causal(steps: int, positions: int, start: int, device: torch.device) -> Tensor:
    """[T, S]: queries from ``start`` on see what is not later than themselves."""
    return torch.ones(steps, positions, dtype=torch.bool, device=device).tril(start)


def causal_behind_padding(tokens: Tensor) -> Tensor:
    """[M, P, 1, 1, 1, L, L] for left-padded prompts, ``tokens`` [M, P, L] True where real.

    A padded position sees itself alone, so that its softmax is defined; nothing reads it.
    """
    length = tokens.shape[-1]
    allowed = causal(length, length, 0, tokens.device) & tokens[..., None, :]
    itself = torch.eye(length, dtype=torch.bool, device=tokens.device)
    return (allowed | itself)[:, :, None, None, None]


def explicit(queries: Tensor, own: KeyValue, prompt: KeyValue | None, visible: Visible) -> Tensor:
    """Products and a softmax, the softmax in at least float32; [M, P, K, G, R, T, D]."""
    shape, depth = queries.shape, queries.shape[-1]
    rows = shape[4] * shape[5]
    queries = queries * depth**-0.5
    k, v = (part.reshape(-1, part.shape[4], depth) for part in own)
    scores = torch.bmm(queries.reshape(-1, rows, depth), k.transpose(1, 2))
    scores = _hide(scores.view(*shape[:-1], -1), visible.own)
    if prompt is None:
        weights = _softmax(scores).view(-1, rows, k.shape[1])
        return torch.bmm(weights.to(v.dtype), v).view(shape)
    assert visible.prompt is not None
    shared_rows = shape[3] * rows
    shared_k, shared_v = (part.reshape(-1, part.shape[4], depth) for part in prompt)
    shared = torch.bmm(queries.reshape(-1, shared_rows, depth), shared_k.transpose(1, 2))
    shared = _hide(shared.view(*shape[:-1], -1), visible.prompt[:, :, None, None, None, None])
    length = shared.shape[-1]
    weights = _softmax(torch.cat([shared, scores], dim=-1)).to(v.dtype)
    of_prompt = torch.bmm(weights[..., :length].reshape(-1, shared_rows, length), shared_v)
    of_own = torch.bmm(weights[..., length:].reshape(-1, rows, k.shape[1]), v)
    return of_prompt.view(shape) + of_own.view(shape)


def fused(queries: Tensor, own: KeyValue, prompt: KeyValue | None, visible: Visible) -> Tensor:
    """The same by torch's fused attention: the completions of a prompt are packed behind it.

    One row of G*R*T queries attends to L + G*S positions, of which it may see its own completion's.
    """
    shape, depth = queries.shape, queries.shape[-1]
    keys, values = (part.reshape(*shape[:3], -1, depth) for part in own)
    if prompt is not None:
        keys, values = (
            torch.cat([part.squeeze(3), packed], dim=3)
            for part, packed in zip(prompt, (keys, values), strict=True)
        )
    packed = queries.reshape(*shape[:3], -1, depth).flatten(0, 1)  # (M*P, K, G*R*T, D)
    mask = visible.packed(shape)
    mixed = F.scaled_dot_product_attention(
        packed, keys.flatten(0, 1), values.flatten(0, 1), attn_mask=mask
    )
    return mixed.view(shape)


def _hide(scores: Tensor, allowed: Tensor) -> Tensor:
    return scores.masked_fill(~allowed, -torch.inf)


def _softmax(scores: Tensor) -> Tensor:
    dtype = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, dim=-1, dtype=dtype)


class Rotation(NamedTuple):
    """Cosines and sines [..., T, D/2] of the angles at some positions."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """The rotation at integer positions [..., T]; ``dtype`` is float32 or wider."""
    channels = torch.arange(0, head_dim, 2, device=positions.device).to(dtype)
    inverse = 1.0 / (theta ** (channels / head_dim))  # (D/2,)
    angles = positions.unsqueeze(-1).to(dtype) * inverse
    return Rotation(angles.cos(), angles.sin())


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Turn heads [..., T, D]; the rotation must broadcast against the first half of them."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * by.cos - second * by.sin, second * by.cos + first * by.sin], dim=-1)
