r"""A population of tiny causal transformers: every weight has a leading run axis.

Architecture, the same for each of the M runs: learned token and position embeddings; blocks of
causal self-attention and a ReLU MLP, each behind a LayerNorm without gain or bias and
with a residual connection; a last LayerNorm; an untied output layer. No biases, no dropout. The
separator that opens the completion is its first input; a prompt is what precedes it.

All weights of a run are one row of a matrix [M, N]; :meth:`Policy.unflatten` gives named views.
Rows are padded to a multiple of ``ROW_MULTIPLE``, so that every run meets the same vector
instructions wherever it stands. All runs go through the same batched products, each with its
own weights, so no run's value depends on which others are there.

Shapes: M runs, P prompts, G completions of each, T tokens, L prompt tokens, d channels,
V vocabulary.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from analysis.records.config import VOCAB_SIZE, PolicyConfig, TrainConfig
from analysis.training.cpu import fast_products
from analysis.training.environment import Weights
from analysis.training.population import uniforms
from analysis.training.tiny.transformer import (
    Activations,
    backward,
    forward,
    pack_completions,
    pack_gradients,
    pack_prompts,
    packing,
    unpack_completions,
)

#: Floats; a multiple of every vector width, unrolling included.
ROW_MULTIPLE = 64
#: On the CPU, passes over whole sequences take as many runs at a time as keep their largest
#: activation below this, so that it is still in the cache when the next operation reads it.
CACHED_FLOATS = 3 * 2**18


class Cache:
    """Room for completions behind a prompt; the first token that is read makes it."""

    def __init__(self, group_size: int, steps: int, keep: bool) -> None:
        self.group_size, self.steps, self.keep = group_size, steps, keep
        self.activations: Activations | None = None
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
        #: Weights of one run, and the zeros that fill its row.
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

    def reference(self, start: Tensor, runs: int) -> Weights:
        """The starting weights [M, N]; one row [1, N] serves every run, at no cost in memory."""
        return self.unflatten(start.expand(runs, -1))

    def prefill(self, weights: Weights, prompts: Tensor) -> Tensor:
        """What completions see of prompts [M, P, L]: their tokens, read with the first step."""
        return prompts

    def empty_cache(self, like: Tensor, *, keep: bool = False) -> Cache:
        """Room for completions of the shape of ``like`` [M, P, G, T].

        ``keep`` keeps the activations too: :meth:`replay` needs them.
        """
        return Cache(like.shape[2], like.shape[3], keep)

    def extend(
        self,
        weights: Weights,
        prefix: Tensor,
        tokens: Tensor,
        cache: Cache | None = None,
        start: int = 0,
    ) -> Tensor:
        """Logits [M, P, G, T, V] of what follows each of ``tokens`` [M, P, G, T].

        They are the completion's tokens from ``start`` on; those before are in ``cache``, and these
        are written into it.
        """
        cache = self.empty_cache(tokens) if cache is None else cache
        rows = pack_completions(tokens)
        if start == 0:
            cache.weights = {name: part.contiguous() for name, part in weights.items()}
            cache.activations = self._activations(weights, prefix.shape, cache)
            rows = torch.cat([pack_prompts(prefix), rows], dim=1)
        with _products(weights, cache.activations):
            logits = forward(cache.weights, rows, cache.activations)
        return unpack_completions(logits[:, -tokens.shape[2] * tokens.shape[3] :], tokens.shape[2])

    def logits(self, weights: Weights, prompts: Tensor, inputs: Tensor) -> Tensor:
        """Logits [M, P, G, T, V] for prompts [M, P, L] and completion inputs [M, P, G, T]."""
        if torch.is_grad_enabled() and weights["head"].requires_grad:
            cache = self.empty_cache(inputs, keep=True)
            with torch.no_grad():
                self.extend(weights, prompts, inputs, cache)
            return self.replay(weights, cache)
        _, _, groups, steps = inputs.shape
        blocks = self._blocks(prompts, prompts.shape[2] + groups * steps)
        return torch.cat([self.extend(_of_runs(weights, b), prompts[b], inputs[b]) for b in blocks])

    def replay(self, weights: Weights, cache: Cache) -> Tensor:
        """The logits [M, P, G, T, V] that filled ``cache``, as a function of ``weights``.

        ``weights`` must be those that filled it, and its activations kept: the gradient is taken
        at the copy of them that is in ``cache``.
        """
        blocks = self._blocks(cache.activations.qkv[0][0], cache.activations.layout.size)
        return _Replay.apply(cache, blocks, *weights.values())

    def _blocks(self, like: Tensor, rows: int) -> list[slice]:
        """Runs to take at a time, for tensors [M, P, ...] of so many packed rows."""
        runs, prompts = like.shape[:2]
        if like.device.type != "cpu":
            return [slice(0, runs)]
        inner = self.config.mlp_factor * self.config.width
        largest = prompts * rows * max(inner, self.config.num_heads * rows)
        size = max(1, CACHED_FLOATS // largest)
        return [slice(first, first + size) for first in range(0, runs, size)]

    def _activations(self, weights: Weights, prompts: torch.Size, cache: Cache) -> Activations:
        heads = self.config.num_heads
        head = weights["head"]
        layout = packing(prompts[2], cache.group_size, cache.steps, head.dtype, head.device)
        shape = (prompts[0], prompts[1], heads, self.config.width // heads)
        return Activations(layout, shape, self.config.num_layers, head, keep=cache.keep)


def _of_runs(weights: Weights, runs: slice) -> Weights:
    return {name: part[runs] for name, part in weights.items()}


def _products(weights: Weights, activations: Activations) -> AbstractContextManager[None]:
    """The fast products, if even one run's smallest, one step of one head, is large enough."""
    _, width, vocab_size = weights["head"].shape
    layout = activations.layout
    seen = layout.prompt_length + layout.group_size
    rows = activations.qkv[0].shape[2] * layout.group_size
    return fast_products(weights["head"].device, rows * width * min(vocab_size, seen))


class _Replay(torch.autograd.Function):
    """The logits that were kept, with the gradient that their activations give, block by block."""

    @staticmethod
    def forward(ctx: Any, cache: Cache, blocks: list[slice], *weights: Tensor) -> Tensor:
        ctx.cache, ctx.blocks = cache, blocks
        activations = cache.activations
        layout, prompts = activations.layout, activations.qkv[0].shape[2]
        logits = torch.cat([span.logits for span in activations.spans], dim=1)
        logits = logits.unflatten(1, (-1, prompts))  # (M, S, P, V)
        return unpack_completions(logits[:, layout.prompt_length :], layout.group_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        activations, weights = ctx.cache.activations, ctx.cache.weights
        packed = pack_gradients(gradient, activations.layout.prompt_length)
        with _products(weights, activations):
            parts = [
                backward(_of_runs(weights, b), activations.of_runs(b), packed[b])
                for b in ctx.blocks
            ]
        return None, None, *(torch.cat([part[name] for part in parts]) for name in weights)


def make_policy(config: TrainConfig) -> Policy:
    """The policy that fits the task of ``config``."""
    task = config.task
    return Policy(config.policy, VOCAB_SIZE, task.prompt_length + task.completion_length)
