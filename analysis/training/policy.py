r"""A population of tiny causal transformers: every weight has a leading member axis.

Architecture, the same for each of the M members: learned token and position embeddings; blocks of
causal self-attention and a ReLU MLP, each behind a LayerNorm without gain or bias and
with a residual connection; a last LayerNorm; an untied output layer. No biases, no dropout. The
separator that opens the completion is its first input; a prompt is what precedes it.

All weights of a member are one row of a matrix [M, N]; :meth:`Policy.unflatten` gives named views.
Rows are padded to a multiple of ``ROW_MULTIPLE``, so that every member meets the same vector
instructions wherever it stands. All members go through the same batched products, each with its
own weights, so no member's value depends on which others are there.

A group of G completions shares one prompt. The prompt's keys and values are computed once
(``prefix``) and every completion attends to them and to its own past: the prompt is not repeated
G times. Sampling is the same function, one token at a time, with a cache of the completion's past.
That cache has its full length from the start: softmax over rows of 16 is ten times faster on the
CPU than over 15.

Shapes: M members, P prompts, G completions of each, T tokens, L prompt tokens, H heads, D = d/H
channels a head, d channels, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from analysis.training.randomness import uniforms
from analysis.training.schema import Schema
from analysis.training.setting import Weights

#: Floats; a multiple of every vector width, unrolling included.
ROW_MULTIPLE = 64


class PolicyConfig(Schema):
    """The size of one member."""

    width: int = Field(default=32, ge=4)
    num_layers: int = Field(default=2, ge=1)
    num_heads: int = Field(default=4, ge=1)
    #: Width of the MLP over the width of the residual stream.
    mlp_factor: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _heads_divide_width(self) -> PolicyConfig:
        if self.width % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} must divide width={self.width}")
        return self


class KeyValue(NamedTuple):
    """Keys and values of one layer, [M, P, H, G, T, D]."""

    keys: Tensor
    values: Tensor


#: Per layer, what later tokens attend to.
Cache = Sequence[KeyValue]


class Policy:
    """The layout and the forward pass; it holds sizes, never weights."""

    def __init__(self, config: PolicyConfig, vocab_size: int, max_length: int) -> None:
        d, inner = config.width, config.mlp_factor * config.width
        self.config = config
        self.shapes: dict[str, tuple[int, int]] = {
            "token_embedding": (vocab_size, d),
            "position_embedding": (max_length, d),
        }
        for layer in range(config.num_layers):
            self.shapes |= {
                f"block{layer}.attention_in": (d, 3 * d),
                f"block{layer}.attention_out": (d, d),
                f"block{layer}.mlp_in": (d, inner),
                f"block{layer}.mlp_out": (inner, d),
            }
        self.shapes["head"] = (d, vocab_size)
        self.sizes = [math.prod(shape) for shape in self.shapes.values()]
        #: Weights of one member, and the zeros that fill its row.
        self.num_parameters = sum(self.sizes)
        self.padding = -self.num_parameters % ROW_MULTIPLE

    def initial_weights(self, seed: int, dtype: torch.dtype) -> Tensor:
        """[1, N]: zero-mean normal weights; products into the residual stream start smaller."""
        depth = 2 * self.config.num_layers
        parts = []
        for index, (name, (rows, columns)) in enumerate(self.shapes.items()):
            std = 1.0 if name.endswith("embedding") else rows**-0.5
            if name.endswith("_out"):
                std /= math.sqrt(depth)
            drawn = uniforms(seed, "weights", index, (2, rows * columns))
            normal = np.sqrt(-2.0 * np.log1p(-drawn[0])) * np.cos(2.0 * np.pi * drawn[1])
            parts.append(std * normal)
        parts.append(np.zeros(self.padding))
        return torch.from_numpy(np.concatenate(parts)).to(dtype).unsqueeze(0)

    def unflatten(self, weights: Tensor) -> dict[str, Tensor]:
        """Named views [M, rows, columns] of weights [M, N]."""
        *chunks, _ = weights.split([*self.sizes, self.padding], dim=1)
        return {
            name: chunk.unflatten(1, shape)
            for (name, shape), chunk in zip(self.shapes.items(), chunks, strict=True)
        }

    def reference(self, start: Tensor, members: int) -> Weights:
        """The starting weights [1, N] as those of every member, at no cost in memory."""
        return self.unflatten(start.expand(members, -1))

    def prefill(self, weights: Weights, prompts: Tensor) -> Cache:
        """Keys and values of prompts [M, P, L], one "completion" each."""
        return self._run(weights, prompts.unsqueeze(2))[1]

    def empty_cache(self, like: Tensor) -> Cache:
        """Room for completions of the shape and dtype of ``like`` [M, P, G, T]."""
        members, prompts, groups, steps = like.shape
        heads = self.config.num_heads
        shape = (members, prompts, heads, groups, steps, self.config.width // heads)
        return [
            KeyValue(like.new_zeros(shape), like.new_zeros(shape))
            for _ in range(self.config.num_layers)
        ]

    def extend(
        self,
        weights: Weights,
        prefix: Cache,
        tokens: Tensor,
        past: Cache | None = None,
        start: int = 0,
    ) -> Tensor:
        """Logits [M, P, G, T, V] of what follows each of ``tokens`` [M, P, G, T].

        They are the completion's tokens from ``start`` on; those before are in the cache ``past``,
        and these are written into it.
        """
        hidden, _ = self._run(weights, tokens, prefix, past, start)
        logits = torch.bmm(_norm(hidden), weights["head"])
        return logits.unflatten(1, tokens.shape[1:])

    def logits(self, weights: Weights, prompts: Tensor, inputs: Tensor) -> Tensor:
        """Logits [M, P, G, T, V] for prompts [M, P, L] and completion inputs [M, P, G, T]."""
        return self.extend(weights, self.prefill(weights, prompts), inputs)

    def _run(
        self,
        weights: Weights,
        tokens: Tensor,
        prefix: Cache | None = None,
        past: Cache | None = None,
        start: int = 0,
    ) -> tuple[Tensor, Cache]:
        """Hidden states [M, P*G*T, d] of tokens [M, P, G, T], and their keys and values."""
        shape = tokens.shape
        position = start if prefix is None else start + prefix[0].keys.shape[4]
        x = _embed(weights["token_embedding"], tokens)  # (M, P, G, T, d)
        positions = weights["position_embedding"][:, position : position + shape[3]]
        x = (x + positions[:, None, None]).flatten(1, 3)  # (M, P*G*T, d)
        cache = []
        for layer in range(self.config.num_layers):
            name = f"block{layer}."
            qkv = torch.bmm(_norm(x), weights[name + "attention_in"])
            qkv = qkv.view(*shape, 3, self.config.num_heads, -1)  # (M, P, G, T, 3, H, D)
            queries, keys, values = qkv.permute(4, 0, 1, 5, 2, 3, 6).unbind(0)  # (M, P, H, G, T, D)
            own = KeyValue(keys, values)
            if past is not None:
                for kept, new in zip(past[layer], own, strict=True):
                    kept[..., start : start + shape[3], :] = new
                own = past[layer]
            cache.append(own)
            mixed = _attend(queries, own, None if prefix is None else prefix[layer], start)
            mixed = mixed.permute(0, 1, 3, 4, 2, 5).reshape(x.shape)
            x = torch.baddbmm(x, mixed, weights[name + "attention_out"])
            inner = torch.bmm(_norm(x), weights[name + "mlp_in"]).relu_()
            x = torch.baddbmm(x, inner, weights[name + "mlp_out"])
        return x, cache


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _embed(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of each member's own table [M, V, d] for its tokens [M, ...]."""
    members, vocab_size, _ = table.shape
    offsets = vocab_size * torch.arange(members, device=tokens.device)
    shifted = tokens + offsets.view(-1, *[1] * (tokens.ndim - 1))
    return F.embedding(shifted, table.flatten(0, 1))


def _attend(queries: Tensor, own: KeyValue, prefix: KeyValue | None, start: int) -> Tensor:
    """Causal attention of T queries, from ``start`` on, to S own positions and a shared prefix.

    ``queries`` [M, P, H, G, T, D], ``own`` [M, P, H, G, S, D], ``prefix`` [M, P, H, 1, L, D].
    Explicit products and a softmax: fused attention kernels are slow for heads this small.
    """
    groups, steps, depth = queries.shape[3:]
    queries = queries * depth**-0.5
    q = queries.reshape(-1, steps, depth)  # (M*P*H*G, T, D)
    k, v = (part.reshape(-1, part.shape[4], depth) for part in own)  # (M*P*H*G, S, D)
    scores = torch.bmm(q, k.transpose(1, 2)) + _causal(steps, k.shape[1], start, q)
    if prefix is None:
        return torch.bmm(torch.softmax(scores, dim=-1), v).view(queries.shape)
    shared_q = q.view(-1, groups * steps, depth)  # (M*P*H, G*T, D)
    shared_k, shared_v = (part.reshape(-1, part.shape[4], depth) for part in prefix)
    shared_scores = torch.bmm(shared_q, shared_k.transpose(1, 2))  # (M*P*H, G*T, L)
    length = shared_k.shape[1]
    shared_scores = shared_scores.view(-1, steps, length)  # (M*P*H*G, T, L)
    weights = torch.softmax(torch.cat([shared_scores, scores], dim=-1), dim=-1)
    from_prefix = torch.bmm(
        weights[..., :length].reshape(-1, groups * steps, length), shared_v
    )  # (M*P*H, G*T, D)
    from_own = torch.bmm(weights[..., length:], v)  # (M*P*H*G, T, D)
    return (from_prefix.view(from_own.shape) + from_own).view(queries.shape)


def _causal(steps: int, positions: int, start: int, like: Tensor) -> Tensor:
    """[T, S]: 0 where the query may look, -inf at later positions."""
    allowed = torch.ones(steps, positions, dtype=torch.bool, device=like.device)
    allowed = allowed.tril(start)
    return torch.zeros_like(allowed, dtype=like.dtype).masked_fill(~allowed, -torch.inf)
