r"""The tiny transformer of a population, forward and backward, on runs of packed rows.

Both are written out on the activations of a :class:`Tape`: what sampling computes token by token
is what the gradient needs, so an on-policy update has no second forward pass.

Shapes: M members, P prompts, S packed rows (:mod:`analysis.training.packing`), n of them at a
time, d channels, H heads of D channels, V vocabulary. Activations are [M, n*P, d], so that each
member's product is one matrix and successive runs of rows are joined along one axis.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.training.packing import Packing
from analysis.training.setting import Weights

NORM_EPS = 1e-5


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


class Run(NamedTuple):
    """Activations of n successive rows."""

    tokens: Tensor  #: [M, n, P]
    blocks: tuple[Block, ...]
    last_norm: Normed
    logits: Tensor  #: [M, n*P, V]


class Tape:
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
        self.runs: list[Run] = []
        #: Per block, [3, M, P, H, S, D]: queries, keys and values.
        self.qkv = [like.new_empty(3, *heads, rows, depth) for _ in range(num_layers)]
        #: Per block, [M, P, H, S, S]: attention weights.
        self.probs = [like.new_empty(*heads, rows, rows) for _ in range(num_layers if keep else 0)]

    def of_members(self, members: slice) -> Tape:
        """The part of some members, sharing its memory."""
        part = copy.copy(self)
        part.qkv = [qkv[:, members] for qkv in self.qkv]
        part.probs = [probs[members] for probs in self.probs]
        part.runs = [_members_of(run, members) for run in self.runs]
        return part


def forward(weights: Weights, tokens: Tensor, tape: Tape) -> Tensor:
    """Logits [M, n, P, V] of the next n rows, with ``tokens`` [M, n, P], written onto the tape."""
    members, rows, prompts = tokens.shape
    first, end = tape.filled, tape.filled + tokens.shape[1]
    x = _embed(weights, tokens, tape.layout.positions[first:end])
    mask = tape.layout.mask[first:end]
    blocks = []
    for layer, qkv in enumerate(tape.qkv):
        name = f"block{layer}."
        heads, depth = qkv.shape[3], qkv.shape[5]
        attention_norm = _norm(x)
        new = torch.bmm(attention_norm.outputs, weights[name + "attention_in"])
        new = new.view(members, rows, prompts, 3, heads, depth)
        new = new.permute(3, 0, 2, 4, 1, 5).contiguous()  # (3, M, P, H, n, D)
        if rows == tape.layout.size:
            tape.qkv[layer] = qkv = new
        else:
            if first == 0:
                qkv.zero_()  # rows to come are masked, but must be finite
            qkv[..., first:end, :] = new
        queries = new[0].flatten(0, 2)  # (M*P*H, n, D)
        _, keys, values = qkv.flatten(1, 3).unbind(0)  # (M*P*H, S, D)
        scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=depth**-0.5)
        probs = torch.softmax(scores, dim=-1)  # (M*P*H, n, end)
        if tape.keep:
            tape.probs[layer].flatten(0, 2)[:, first:end] = probs
        mixed = torch.bmm(probs, values).view(members, prompts, heads, rows, depth)
        mixed = mixed.permute(0, 3, 1, 2, 4).reshape(x.shape)
        x = torch.baddbmm(x, mixed, weights[name + "attention_out"])
        mlp_norm = _norm(x)
        inner = torch.bmm(mlp_norm.outputs, weights[name + "mlp_in"]).relu_()
        x = torch.baddbmm(x, inner, weights[name + "mlp_out"])
        if tape.keep:
            blocks.append(Block(attention_norm, mixed, mlp_norm, inner))
    last_norm = _norm(x)
    logits = torch.bmm(last_norm.outputs, weights["head"])
    tape.filled = end
    if tape.keep:
        tape.runs.append(Run(tokens, tuple(blocks), last_norm, logits))
    return logits.view(members, rows, prompts, -1)


def backward(weights: Weights, tape: Tape, gradient: Tensor) -> dict[str, Tensor]:
    """Gradients, by the names of ``weights``, from that of the logits [M, S, P, V]."""
    run = _joined(tape.runs)
    gradient = gradient.flatten(1, 2)  # (M, S*P, V)
    grads = {"head": _weight_gradient(run.last_norm.outputs, gradient)}
    grad_x = _norm_backward(_input_gradient(gradient, weights["head"]), run.last_norm)
    for layer in reversed(range(len(tape.qkv))):
        block, name = run.blocks[layer], f"block{layer}."
        grads[name + "mlp_out"] = _weight_gradient(block.inner, grad_x)
        inner = _input_gradient(grad_x, weights[name + "mlp_out"])
        inner = torch.ops.aten.threshold_backward(inner, block.inner, 0)
        grads[name + "mlp_in"] = _weight_gradient(block.mlp_norm.outputs, inner)
        normed = _input_gradient(inner, weights[name + "mlp_in"])
        grad_x = grad_x.add_(_norm_backward(normed, block.mlp_norm))
        grads[name + "attention_out"] = _weight_gradient(block.mixed, grad_x)
        mixed = _input_gradient(grad_x, weights[name + "attention_out"])
        qkv = _attention_backward(mixed, tape.qkv[layer], tape.probs[layer])
        grads[name + "attention_in"] = _weight_gradient(block.attention_norm.outputs, qkv)
        normed = _input_gradient(qkv, weights[name + "attention_in"])
        grad_x = grad_x.add_(_norm_backward(normed, block.attention_norm))
    return grads | _embedding_gradients(weights, run.tokens, tape.layout.positions, grad_x)


def _attention_backward(mixed: Tensor, qkv: Tensor, probs: Tensor) -> Tensor:
    """Gradient of queries, keys and values [M, S*P, 3d] from that of what was gathered."""
    _, members, prompts, heads, rows, depth = qkv.shape
    mixed = mixed.view(members, rows, prompts, heads, depth).permute(0, 2, 3, 1, 4)
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
    return grad.view(qkv.shape).permute(1, 4, 2, 0, 3, 5).reshape(members, rows * prompts, -1)


def _embed(weights: Weights, tokens: Tensor, positions: Tensor) -> Tensor:
    """[M, n*P, d]: each member's own rows for its tokens [M, n, P], plus those of positions [n]."""
    table = weights["token_embedding"]  # (M, V, d)
    members, vocab_size, _ = table.shape
    offsets = vocab_size * torch.arange(members, device=tokens.device).view(-1, 1, 1)
    x = F.embedding(tokens + offsets, table.flatten(0, 1))
    return x.add_(weights["position_embedding"].index_select(1, positions).unsqueeze(2)).flatten(
        1, 2
    )


def _embedding_gradients(
    weights: Weights, tokens: Tensor, positions: Tensor, gradient: Tensor
) -> dict[str, Tensor]:
    """Sums over the rows of each token and position, as products: the same at every run."""
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


def _joined(runs: list[Run]) -> Run:
    """Runs one after another, their rows along axis 1."""
    return runs[0] if len(runs) == 1 else _map(lambda *parts: torch.cat(parts, dim=1), *runs)


def _members_of(run: Run, members: slice) -> Run:
    return _map(lambda part: part[members], run)


def _map(function: Callable[..., Tensor], *trees: Any) -> Any:
    """Apply a function to corresponding tensors of nested tuples."""
    if isinstance(trees[0], Tensor):
        return function(*trees)
    fields = [_map(function, *fields) for fields in zip(*trees, strict=True)]
    return type(trees[0])(*fields) if hasattr(trees[0], "_fields") else tuple(fields)
