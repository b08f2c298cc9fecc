r"""The tiny transformer of a population, forward and backward, on spans of packed rows.

Both are written out on :class:`Activations`: what sampling computes token by token is
what the gradient needs, so an on-policy update has no second forward pass.

One packed sequence per prompt: the prompt once, then its completions, step by step. Row
``L + t G + g`` is token ``t`` of completion ``g``: what sampling has written at any moment is one
run of rows, and so is what it writes next. A completion's rows look at the prompt and at what comes
before them in their own completion; other completions are masked.

Shapes: M runs, P prompts of L tokens, G completions of T tokens, S = L + G T rows, n of them at a
time, d channels, H heads of D channels, V vocabulary. Activations are [M, n*P, d], so that each
run's product is one matrix and successive spans of rows are joined along one axis.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.training.environment import Weights

NORM_EPS = 1e-5


class Packing(NamedTuple):
    """Where the rows of a packed sequence stand and what they may look at."""

    prompt_length: int
    group_size: int
    positions: Tensor  #: [S], of each row in its own text
    mask: Tensor  #: [S, S], 0 where the row may look, -inf elsewhere

    @property
    def size(self) -> int:
        """S."""
        return self.positions.shape[0]


@lru_cache(maxsize=32)
def packing(
    prompt_length: int, group_size: int, steps: int, dtype: torch.dtype, device: torch.device
) -> Packing:
    """The packing of ``group_size`` completions of ``steps`` tokens behind one prompt."""
    prompt = torch.arange(prompt_length, device=device)
    step = torch.arange(steps, device=device).repeat_interleave(group_size)
    positions = torch.cat([prompt, prompt_length + step])
    completion = torch.arange(group_size, device=device).repeat(steps)
    owner = torch.cat([torch.full_like(prompt, -1), completion])
    related = (owner == -1) | (owner == owner.unsqueeze(1))
    allowed = related & (positions <= positions.unsqueeze(1))
    mask = torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, -torch.inf)
    return Packing(prompt_length, group_size, positions, mask)


def pack_prompts(prompts: Tensor) -> Tensor:
    """[M, L, P] from prompts [M, P, L]."""
    return prompts.transpose(1, 2)


def pack_completions(tokens: Tensor) -> Tensor:
    """[M, T*G, P] from completion tokens [M, P, G, T]."""
    return tokens.permute(0, 3, 2, 1).flatten(1, 2)


def unpack_completions(values: Tensor, group_size: int) -> Tensor:
    """[M, P, G, T, V] from the completion rows [M, T*G, P, V]."""
    return values.unflatten(1, (-1, group_size)).permute(0, 3, 2, 1, 4).contiguous()


def pack_gradients(gradient: Tensor, prompt_length: int) -> Tensor:
    """[M, S, P, V] from the gradients of completion rows [M, P, G, T, V]: zero on the prompt."""
    rows = gradient.permute(0, 3, 2, 1, 4).flatten(1, 2)  # (M, T*G, P, V)
    on_prompt = rows.new_zeros(rows.shape[0], prompt_length, *rows.shape[2:])
    return torch.cat([on_prompt, rows], dim=1)


class Normed(NamedTuple):
    """A LayerNorm without gain or bias, and what its gradient needs."""

    inputs: Tensor  #: [M, n*P, d]
    outputs: Tensor  #: [M, n*P, d]
    mean: Tensor  #: [M, n*P, 1]
    rstd: Tensor  #: [M, n*P, 1]


class Block(NamedTuple):
    """Activations of one block."""

    attention_norm: Normed
    mixed: Tensor  #: [M, n*P, d], what attention gathered
    mlp_norm: Normed
    inner: Tensor  #: [M, n*P, inner], behind the ReLU


class Span(NamedTuple):
    """Activations of n successive rows."""

    tokens: Tensor  #: [M, n, P]
    blocks: tuple[Block, ...]
    last_norm: Normed
    logits: Tensor  #: [M, n*P, V]


class Activations:
    """Keys and values of the rows so far; with ``keep``, everything that the gradient needs.

    Args:
        layout: of the packed sequences.
        shape: M, P, H and D.
        num_layers: blocks of the transformer.
        like: of the weights' dtype and device.
        keep: is there to be a gradient?
    """

    def __init__(
        self,
        layout: Packing,
        shape: tuple[int, int, int, int],
        num_layers: int,
        like: Tensor,
        *,
        keep: bool,
    ) -> None:
        *heads, depth = shape
        rows = layout.size
        self.layout = layout
        self.keep = keep
        self.filled = 0  #: rows so far
        self.spans: list[Span] = []
        #: Per block, [3, M, P, H, S, D]: queries, keys and values.
        self.qkv = [like.new_empty(3, *heads, rows, depth) for _ in range(num_layers)]
        #: Per block, [M, P, H, S, S]: attention weights.
        self.probs = [like.new_empty(*heads, rows, rows) for _ in range(num_layers if keep else 0)]

    def of_runs(self, runs: slice) -> Activations:
        """The part of some runs, sharing its memory."""
        part = copy.copy(self)
        part.qkv = [qkv[:, runs] for qkv in self.qkv]
        part.probs = [probs[runs] for probs in self.probs]
        part.spans = [_runs_of(span, runs) for span in self.spans]
        return part


def forward(weights: Weights, tokens: Tensor, activations: Activations) -> Tensor:
    """Logits [M, n, P, V] of the next n rows, with ``tokens`` [M, n, P]; keeps activations."""
    runs, rows, prompts = tokens.shape
    first, end = activations.filled, activations.filled + tokens.shape[1]
    x = _embed(weights, tokens, activations.layout.positions[first:end])
    mask = activations.layout.mask[first:end]
    blocks = []
    for layer, qkv in enumerate(activations.qkv):
        name = f"block{layer}."
        heads, depth = qkv.shape[3], qkv.shape[5]
        attention_norm = _norm(x)
        new = torch.bmm(attention_norm.outputs, weights[name + "attention_in"])
        new = new.view(runs, rows, prompts, 3, heads, depth)
        new = new.permute(3, 0, 2, 4, 1, 5).contiguous()  # (3, M, P, H, n, D)
        if rows == activations.layout.size:
            activations.qkv[layer] = qkv = new
        else:
            if first == 0:
                qkv.zero_()  # rows to come are masked, but must be finite
            qkv[..., first:end, :] = new
        queries = new[0].flatten(0, 2)  # (M*P*H, n, D)
        _, keys, values = qkv.flatten(1, 3).unbind(0)  # (M*P*H, S, D)
        scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=depth**-0.5)
        probs = torch.softmax(scores, dim=-1)  # (M*P*H, n, end)
        if activations.keep:
            activations.probs[layer].flatten(0, 2)[:, first:end] = probs
        mixed = torch.bmm(probs, values).view(runs, prompts, heads, rows, depth)
        mixed = mixed.permute(0, 3, 1, 2, 4).reshape(x.shape)
        x = torch.baddbmm(x, mixed, weights[name + "attention_out"])
        mlp_norm = _norm(x)
        inner = torch.bmm(mlp_norm.outputs, weights[name + "mlp_in"]).relu_()
        x = torch.baddbmm(x, inner, weights[name + "mlp_out"])
        if activations.keep:
            blocks.append(Block(attention_norm, mixed, mlp_norm, inner))
    last_norm = _norm(x)
    logits = torch.bmm(last_norm.outputs, weights["head"])
    activations.filled = end
    if activations.keep:
        activations.spans.append(Span(tokens, tuple(blocks), last_norm, logits))
    return logits.view(runs, rows, prompts, -1)


def backward(weights: Weights, activations: Activations, gradient: Tensor) -> dict[str, Tensor]:
    """Gradients, by the names of ``weights``, from that of the logits [M, S, P, V]."""
    span = _joined(activations.spans)
    gradient = gradient.flatten(1, 2)  # (M, S*P, V)
    grads = {"head": _weight_gradient(span.last_norm.outputs, gradient)}
    grad_x = _norm_backward(_input_gradient(gradient, weights["head"]), span.last_norm)
    for layer in reversed(range(len(activations.qkv))):
        block, name = span.blocks[layer], f"block{layer}."
        grads[name + "mlp_out"] = _weight_gradient(block.inner, grad_x)
        inner = _input_gradient(grad_x, weights[name + "mlp_out"])
        inner = torch.ops.aten.threshold_backward(inner, block.inner, 0)
        grads[name + "mlp_in"] = _weight_gradient(block.mlp_norm.outputs, inner)
        normed = _input_gradient(inner, weights[name + "mlp_in"])
        grad_x = grad_x.add_(_norm_backward(normed, block.mlp_norm))
        grads[name + "attention_out"] = _weight_gradient(block.mixed, grad_x)
        mixed = _input_gradient(grad_x, weights[name + "attention_out"])
        qkv = _attention_backward(mixed, activations.qkv[layer], activations.probs[layer])
        grads[name + "attention_in"] = _weight_gradient(block.attention_norm.outputs, qkv)
        normed = _input_gradient(qkv, weights[name + "attention_in"])
        grad_x = grad_x.add_(_norm_backward(normed, block.attention_norm))
    return grads | _embedding_gradients(weights, span.tokens, activations.layout.positions, grad_x)


def _attention_backward(mixed: Tensor, qkv: Tensor, probs: Tensor) -> Tensor:
    """Gradient of queries, keys and values [M, S*P, 3d] from that of what was gathered."""
    _, runs, prompts, heads, rows, depth = qkv.shape
    mixed = mixed.view(runs, rows, prompts, heads, depth).permute(0, 2, 3, 1, 4)
    mixed = mixed.reshape(-1, rows, depth)  # (M*P*H, S, D)
    queries, keys, values = qkv.flatten(1, 3).unbind(0)
    probs = probs.flatten(0, 2)
    grad = torch.empty_like(qkv).flatten(1, 3)
    torch.bmm(probs.transpose(1, 2), mixed, out=grad[2])
    weighted = torch.bmm(mixed, values.transpose(1, 2))
    scores = torch.ops.aten._softmax_backward_data(weighted, probs, -1, probs.dtype)
    scores = scores.mul_(depth**-0.5)
    torch.bmm(scores, keys, out=grad[0])
    torch.bmm(scores.transpose(1, 2), queries, out=grad[1])
    return grad.view(qkv.shape).permute(1, 4, 2, 0, 3, 5).reshape(runs, rows * prompts, -1)


def _embed(weights: Weights, tokens: Tensor, positions: Tensor) -> Tensor:
    """[M, n*P, d]: each run's own rows for its tokens [M, n, P], plus those of positions [n]."""
    table = weights["token_embedding"]  # (M, V, d)
    runs, vocab_size, _ = table.shape
    offsets = vocab_size * torch.arange(runs, device=tokens.device).view(-1, 1, 1)
    x = F.embedding(tokens + offsets, table.flatten(0, 1))
    return x.add_(weights["position_embedding"].index_select(1, positions).unsqueeze(2)).flatten(
        1, 2
    )


def _embedding_gradients(
    weights: Weights, tokens: Tensor, positions: Tensor, gradient: Tensor
) -> dict[str, Tensor]:
    """Sums over the rows of each token and position, as products: the same at every span."""
    one_hot = [
        F.one_hot(index, weights[name].shape[1]).to(gradient.dtype)
        for name, index in (
            ("token_embedding", tokens.flatten(1)),  # (M, S*P, V)
            ("position_embedding", positions.expand(len(tokens), -1)),  # (M, S, positions)
        )
    ]
    over_prompts = gradient.unflatten(1, tokens.shape[1:]).sum(dim=2)  # (M, S, d)
    return {
        "token_embedding": _weight_gradient(one_hot[0], gradient),
        "position_embedding": _weight_gradient(one_hot[1], over_prompts),
    }


def _norm(x: Tensor) -> Normed:
    return Normed(x, *torch.native_layer_norm(x, (x.shape[-1],), None, None, NORM_EPS))


def _norm_backward(gradient: Tensor, norm: Normed) -> Tensor:
    x, _, mean, rstd = norm
    wanted = [True, False, False]
    shape = (x.shape[-1],)
    return torch.ops.aten.native_layer_norm_backward(
        gradient, x, shape, mean, rstd, None, None, wanted
    )[0]


def _weight_gradient(inputs: Tensor, gradient: Tensor) -> Tensor:
    """[M, in, out] of a product with weights, from its inputs and the gradient of its outputs."""
    return torch.bmm(inputs.transpose(1, 2), gradient)


def _input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(gradient, weight.transpose(1, 2))


def _joined(spans: list[Span]) -> Span:
    """Runs one after another, their rows along axis 1."""
    return spans[0] if len(spans) == 1 else _map(lambda *parts: torch.cat(parts, dim=1), *spans)


def _runs_of(span: Span, runs: slice) -> Span:
    return _map(lambda part: part[runs], span)


def _map(function: Callable[..., Tensor], *trees: Any) -> Any:
    """Apply a function to corresponding tensors of nested tuples."""
    if isinstance(trees[0], Tensor):
        return function(*trees)
    fields = [_map(function, *fields) for fields in zip(*trees, strict=True)]
    return type(trees[0])(*fields) if hasattr(trees[0], "_fields") else tuple(fields)
