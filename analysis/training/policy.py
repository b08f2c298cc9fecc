r"""A population of tiny causal transformers: every weight has a leading member axis.

Architecture, the same for each of the M members: learned token and position embeddings; blocks of
causal self-attention and a ReLU MLP, each behind a LayerNorm without gain or bias and
with a residual connection; a last LayerNorm; an untied output layer. No biases, no dropout. The
separator that opens the completion is its first input; a prompt is what precedes it.

All weights of a member are one row of a matrix [M, N]; :meth:`Policy.unflatten` gives named views.
Rows are padded to a multiple of ``ROW_MULTIPLE``, so that every member meets the same vector
instructions wherever it stands. All members go through the same batched products, each with its
own weights, so no member's value depends on which others are there.

Shapes: M members, P prompts, G completions of each, T tokens, L prompt tokens, d channels,
V vocabulary.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.autograd.function import once_differentiable

from analysis.schema import Schema
from analysis.training.packing import (
    pack_completions,
    pack_gradients,
    pack_prompts,
    packing,
    unpack_completions,
)
from analysis.training.products import fast_products
from analysis.training.randomness import uniforms
from analysis.training.setting import Weights
from analysis.training.transformer import Tape, backward, forward

#: Floats; a multiple of every vector width, unrolling included.
ROW_MULTIPLE = 64
#: On the CPU, passes over whole sequences take as many members at a time as keep their largest
#: activation below this, so that it is still in the cache when the next operation reads it.
CACHED_FLOATS = 3 * 2**18


class PolicyConfig(Schema):
    """The size of one member."""

    #: A multiple of four floats: else where a member stands decides which vector instructions it
    #: meets, and it is not its solo run to the bit.
    width: int = Field(default=32, ge=4, multiple_of=4)
    num_layers: int = Field(default=2, ge=1)
    num_heads: int = Field(default=4, ge=1)
    #: Width of the MLP over the width of the residual stream.
    mlp_factor: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _heads_divide_width(self) -> PolicyConfig:
        if self.width % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} must divide width={self.width}")
        return self


class Past:
    """Room for completions behind a prompt; the first token that is read makes it."""

    def __init__(self, group_size: int, steps: int, keep: bool) -> None:
        self.group_size, self.steps, self.keep = group_size, steps, keep
        self.tape: Tape | None = None
        self.weights: Weights = {}  #: contiguous, so that no product copies them again


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
        """The starting weights [M, N]; one row [1, N] serves every member, at no cost in memory."""
        return self.unflatten(start.expand(members, -1))

    def prefill(self, weights: Weights, prompts: Tensor) -> Tensor:
        """What completions see of prompts [M, P, L]: their tokens, read with the first step."""
        return prompts

    def empty_cache(self, like: Tensor, *, keep: bool = False) -> Past:
        """Room for completions of the shape of ``like`` [M, P, G, T].

        ``keep`` keeps the activations too: :meth:`replay` needs them.
        """
        return Past(like.shape[2], like.shape[3], keep)

    def extend(
        self,
        weights: Weights,
        prefix: Tensor,
        tokens: Tensor,
        past: Past | None = None,
        start: int = 0,
    ) -> Tensor:
        """Logits [M, P, G, T, V] of what follows each of ``tokens`` [M, P, G, T].

        They are the completion's tokens from ``start`` on; those before are in ``past``, and these
        are written into it.
        """
        past = self.empty_cache(tokens) if past is None else past
        rows = pack_completions(tokens)
        if start == 0:
            past.weights = {name: part.contiguous() for name, part in weights.items()}
            past.tape = self._tape(weights, prefix.shape, past)
            rows = torch.cat([pack_prompts(prefix), rows], dim=1)
        with _products(weights, past.tape):
            logits = forward(past.weights, rows, past.tape)
        return unpack_completions(logits[:, -tokens.shape[2] * tokens.shape[3] :], tokens.shape[2])

    def logits(self, weights: Weights, prompts: Tensor, inputs: Tensor) -> Tensor:
        """Logits [M, P, G, T, V] for prompts [M, P, L] and completion inputs [M, P, G, T]."""
        if torch.is_grad_enabled() and weights["head"].requires_grad:
            past = self.empty_cache(inputs, keep=True)
            with torch.no_grad():
                self.extend(weights, prompts, inputs, past)
            return self.replay(weights, past)
        _, _, groups, steps = inputs.shape
        blocks = self._blocks(prompts, prompts.shape[2] + groups * steps)
        return torch.cat(
            [self.extend(_of_members(weights, b), prompts[b], inputs[b]) for b in blocks]
        )

    def replay(self, weights: Weights, past: Past) -> Tensor:
        """The logits [M, P, G, T, V] that filled ``past``, as a function of ``weights``.

        ``weights`` must be those that filled it, and its activations kept: the gradient is taken
        at the copy of them that is in ``past``.
        """
        blocks = self._blocks(past.tape.qkv[0][0], past.tape.layout.size)
        return _Replay.apply(past, blocks, *weights.values())

    def _blocks(self, like: Tensor, rows: int) -> list[slice]:
        """Members to take at a time, for tensors [M, P, ...] of so many packed rows."""
        members, prompts = like.shape[:2]
        if like.device.type != "cpu":
            return [slice(0, members)]
        inner = self.config.mlp_factor * self.config.width
        largest = prompts * rows * max(inner, self.config.num_heads * rows)
        size = max(1, CACHED_FLOATS // largest)
        return [slice(first, first + size) for first in range(0, members, size)]

    def _tape(self, weights: Weights, prompts: torch.Size, past: Past) -> Tape:
        heads = self.config.num_heads
        head = weights["head"]
        layout = packing(prompts[2], past.group_size, past.steps, head.dtype, head.device)
        shape = (prompts[0], prompts[1], heads, self.config.width // heads)
        return Tape(layout, shape, self.config.num_layers, head, keep=past.keep)


def _of_members(weights: Weights, members: slice) -> Weights:
    return {name: part[members] for name, part in weights.items()}


def _products(weights: Weights, tape: Tape) -> AbstractContextManager[None]:
    """The fast products, if even one member's smallest, one step of one head, is large enough."""
    _, width, vocab_size = weights["head"].shape
    layout = tape.layout
    seen = layout.prompt_length + layout.group_size
    rows = tape.qkv[0].shape[2] * layout.group_size
    return fast_products(weights["head"].device, rows * width * min(vocab_size, seen))


class _Replay(torch.autograd.Function):
    """The logits on a tape, with the gradient that its activations give, block by block."""

    @staticmethod
    def forward(ctx: Any, past: Past, blocks: list[slice], *weights: Tensor) -> Tensor:
        ctx.past, ctx.blocks = past, blocks
        tape = past.tape
        layout, prompts = tape.layout, tape.qkv[0].shape[2]
        logits = torch.cat([run.logits for run in tape.runs], dim=1)
        logits = logits.unflatten(1, (-1, prompts))  # (M, S, P, V)
        return unpack_completions(logits[:, layout.prompt_length :], layout.group_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tape, weights = ctx.past.tape, ctx.past.weights
        packed = pack_gradients(gradient, tape.layout.prompt_length)
        with _products(weights, tape):
            parts = [
                backward(_of_members(weights, b), tape.of_members(b), packed[b]) for b in ctx.blocks
            ]
        return None, None, *(torch.cat([part[name] for part in parts]) for name in weights)
