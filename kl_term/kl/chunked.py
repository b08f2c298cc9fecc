r"""Full-vocabulary KL from hidden states, in memory that does not grow with the vocabulary.

The usual way materialises the logits ``[tokens, vocab]`` of both policies and several tensors of
the same size besides. All that the divergences need of them are sums over the vocabulary, kept
while walking through it in blocks (:mod:`kl_term.kl.vocabulary_blocks`). The backward pass walks
again and recomputes the logits. Nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kl_term.checks import as_mask, check_float, check_same_shape, checked
from kl_term.kl.vocabulary_blocks import (
    Chunks,
    Head,
    block_logits,
    statistics,
    through_head,
    widened,
)
from kl_term.plain_checks import check_positive

__all__ = [
    "Chunks",
    "Divergences",
    "Head",
    "divergences_from_hidden",
    "entropy_from_hidden",
    "reverse_kl_from_hidden",
]


class Divergences(NamedTuple):
    """Per token, nats; exactly 0 where masked."""

    reverse: Tensor  #: [...], KL of the policy from the reference
    forward: Tensor  #: [...], KL of the reference from the policy
    entropy: Tensor  #: [...], of the policy


@checked(half="kept")
def divergences_from_hidden(
    hidden: Tensor,
    head: Head,
    ref_hidden: Tensor,
    ref_head: Head,
    *,
    mask: Tensor | None = None,
    chunks: Chunks | None = None,
) -> Divergences:
    r"""Both KLs and the entropy of one pass over the vocabulary.

    .. math:: z = (h W^\top + b) / \tau, \qquad
        \mathrm{KL}(p \Vert q) = \mathbb{E}_p[z^p - z^q] - \log Z_p + \log Z_q, \qquad
        H(p) = \log Z_p - \mathbb{E}_p[z^p]

    with :math:`Z = \sum_a e^{z_a}`. Normaliser and means are kept block by block relative to a
    running maximum, so that no logit outlives its block.

    Equation: ``divergences_from_hidden``
    Source: Milakov and Gimelshein (2018) for the online normaliser.
    Gradient: exact, by ``hidden`` and by the weight and bias of ``head``; the reference is
        constant.

    Args:
        hidden: [..., d], last hidden states of the policy (after the final norm).
        head: its unembedding.
        ref_hidden: [..., d_ref], of the reference.
        ref_head: its unembedding, with the same vocabulary.
        mask: [...], True = counted. Other tokens are not computed: what they hold does not matter.
        chunks: tokens and vocabulary entries at a time.

    Returns:
        :class:`Divergences`, in float32 at least. Half-precision inputs are widened a chunk at a
        time, before the product, and sums over chunks are kept in float64.
    """
    check_pair(hidden, head, ref_hidden, ref_head)
    chunks = check_chunks(chunks)
    counted = counted_tokens(hidden, mask)
    ref_bias = None if ref_head.bias is None else ref_head.bias.detach()
    with as_declared(hidden):
        values = _Divergences.apply(
            hidden[counted],
            head.weight,
            head.bias,
            ref_hidden.detach()[counted],
            head.temperature,
            Head(ref_head.weight.detach(), ref_bias, ref_head.temperature),
            chunks,
        )
    return Divergences(*(scattered(value, counted) for value in values))


@checked(half="kept")
def reverse_kl_from_hidden(
    hidden: Tensor,
    head: Head,
    ref_hidden: Tensor,
    ref_head: Head,
    *,
    mask: Tensor | None = None,
    chunks: Chunks | None = None,
) -> Tensor:
    r"""Exact per-token reverse KL without a ``[tokens, vocab]`` tensor.

    .. math:: \mathrm{KL}(\pi_\theta \Vert \pi_{\mathrm{ref}})
        = \mathbb{E}_{\pi_\theta}[z - z^{\mathrm{ref}}] - \log Z + \log Z_{\mathrm{ref}}, \qquad
        \frac{\partial}{\partial z} = \pi_\theta \odot (l - \mathrm{KL})

    Equation: ``reverse_kl_from_hidden``
    Gradient: that of ``reverse_kl_gradient``, through the unembedding.

    Args: as :func:`divergences_from_hidden`.

    Returns:
        [...], nats; 0 where masked.
    """
    return divergences_from_hidden(
        hidden, head, ref_hidden, ref_head, mask=mask, chunks=chunks
    ).reverse


@checked(half="kept")
def entropy_from_hidden(
    hidden: Tensor, head: Head, *, mask: Tensor | None = None, chunks: Chunks | None = None
) -> Tensor:
    r"""Exact per-token entropy without a ``[tokens, vocab]`` tensor.

    .. math:: H(\pi_\theta) = \log Z - \mathbb{E}_{\pi_\theta}[z], \qquad
        \frac{\partial}{\partial z} = -\pi_\theta \odot (\log \pi_\theta + H)

    The reference is given an unembedding of width 0, which costs nothing.

    Equation: ``entropy_from_hidden``

    Args: as :func:`divergences_from_hidden`.

    Returns:
        [...], nats; 0 where masked.
    """
    check_head(hidden, head, "hidden", "head")
    no_head = Head(head.weight.new_zeros(len(head.weight), 0))
    nowhere = hidden.new_zeros(*hidden.shape[:-1], 0)
    return divergences_from_hidden(hidden, head, nowhere, no_head, mask=mask, chunks=chunks).entropy


class _Divergences(torch.autograd.Function):
    """Of ``hidden [N, d]``, ``weight [V, d]`` and ``bias [V]``; the rest is constant."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        ref_hidden: Tensor,
        temperature: float,
        ref_head: Head,
        chunks: Chunks,
    ) -> tuple[Tensor, ...]:
        dtype = compute_dtype(hidden, weight, ref_hidden, ref_head.weight)
        head = Head(weight, bias, temperature)
        s = statistics(hidden, head, ref_hidden, ref_head, chunks, dtype)
        reverse = s.mean_gap - s.log_z + s.ref_log_z
        forward = s.log_z - s.ref_log_z - s.ref_mean_gap
        entropy = s.log_z - s.mean_logit
        ctx.save_for_backward(
            hidden, weight, bias, ref_hidden, s.log_z, s.ref_log_z, reverse, entropy
        )
        ctx.constants = temperature, ref_head, chunks, dtype
        ctx.set_materialize_grads(False)
        return tuple(value.to(dtype) for value in (reverse, forward, entropy))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by_divergence: Tensor | None) -> tuple[Tensor | None, ...]:
        with as_declared(ctx.saved_tensors[0]):
            return _Divergences._backward(ctx, *by_divergence)

    @staticmethod
    def _backward(
        ctx: Any, by_reverse: Tensor | None, by_forward: Tensor | None, by_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ref_hidden, *per_token = ctx.saved_tensors
        temperature, ref_head, chunks, dtype = ctx.constants
        log_z, ref_log_z, reverse, entropy = (x.to(dtype).unsqueeze(-1) for x in per_token)
        head = Head(weight, bias, temperature)

        def of_block(block: slice, wide: Head) -> Callable[[slice, Tensor], Tensor]:
            ref_wide = widened(ref_head, block, dtype)

            def by_logits(rows: slice, states: Tensor) -> Tensor:
                logp = block_logits(states, wide).sub_(log_z[rows])
                ref_logp = block_logits(ref_hidden[rows].to(dtype), ref_wide).sub_(ref_log_z[rows])
                policy = logp.exp()
                found = torch.zeros_like(policy)
                if by_reverse is not None:
                    centred = (logp - ref_logp).sub_(reverse[rows])
                    found += centred.mul_(policy).mul_(by_reverse[rows].unsqueeze(-1))
                if by_forward is not None:
                    gap = policy - ref_logp.exp_()
                    found += gap.mul_(by_forward[rows].unsqueeze(-1))
                if by_entropy is not None:
                    surprise = logp.add_(entropy[rows]).mul_(policy)
                    found -= surprise.mul_(by_entropy[rows].unsqueeze(-1))
                return found

            return by_logits

        _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        found = through_head(
            hidden, head, chunks, dtype, of_block, weight=wants_weight, bias=wants_bias
        )
        return *found, None, None, None, None


def as_declared(tensor: Tensor) -> torch.autocast:
    """No autocast: products of widened blocks would be rounded to half precision again."""
    return torch.autocast(tensor.device.type, enabled=False)


def compute_dtype(*inputs: Tensor) -> torch.dtype:
    dtype = torch.float32
    for tensor in inputs:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def counted_tokens(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """[...] bool, the tokens to compute."""
    if mask is None:
        return torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device)
    return as_mask("mask", mask, "hidden[..., 0]", hidden[..., 0])


def scattered(values: Tensor, counted: Tensor) -> Tensor:
    return values.new_zeros(counted.shape).masked_scatter(counted, values)


def check_chunks(chunks: Chunks | None) -> Chunks:
    """The chunks given, or the usual ones."""
    chunks = chunks or Chunks()
    for name, size in chunks._asdict().items():
        check_positive(f"chunks.{name}", size)
    return chunks


def check_pair(hidden: Tensor, head: Head, ref_hidden: Tensor, ref_head: Head) -> None:
    """Raises: ValueError: no two policies over the same tokens and one vocabulary."""
    check_head(hidden, head, "hidden", "head")
    check_head(ref_hidden, ref_head, "ref_hidden", "ref_head")
    if hidden.shape[:-1] != ref_hidden.shape[:-1]:
        raise ValueError(
            f"ref_hidden is for tokens {tuple(ref_hidden.shape[:-1])} but hidden for "
            f"{tuple(hidden.shape[:-1])}: they must be the same tokens"
        )
    if len(head.weight) != len(ref_head.weight):
        raise ValueError(
            f"ref_head has {len(ref_head.weight)} tokens but head has {len(head.weight)}: "
            "a KL needs one vocabulary"
        )


def check_head(hidden: Tensor, head: Head, hidden_name: str, head_name: str) -> None:
    check_float(hidden_name, hidden)
    check_float(f"{head_name}.weight", head.weight)
    check_positive(f"{head_name}.temperature", head.temperature)
    if hidden.ndim < 2 or head.weight.ndim != 2 or hidden.shape[-1] != head.weight.shape[1]:
        raise ValueError(
            f"{hidden_name} has shape {tuple(hidden.shape)} and {head_name}.weight "
            f"{tuple(head.weight.shape)}: they must be [..., d] with a token axis, and [V, d]"
        )
    if head.bias is not None:
        check_float(f"{head_name}.bias", head.bias)
        check_same_shape(
            f"{head_name}.weight[:, 0]", head.weight[:, 0], f"{head_name}.bias", head.bias
        )
