r"""Sums over the top k from hidden states, in memory that does not grow with the vocabulary.

What a sum over :math:`k` tokens needs of all others is the normaliser, which one walk through the
vocabulary keeps (:mod:`kl_term.kl.vocabulary_blocks`). The backward pass walks again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kl_term.checks import checked
from kl_term.kl.chunked import (
    Chunks,
    Head,
    as_declared,
    check_chunks,
    check_head,
    check_pair,
    compute_dtype,
    counted_tokens,
    scattered,
)
from kl_term.kl.names import CORRECTIONS, DIRECTIONS, SUPPORTS
from kl_term.kl.top_k import check_top_k, correction_of, support_divergence
from kl_term.kl.vocabulary_blocks import (
    block_logits,
    blocks,
    largest_logits,
    log_normaliser,
    through_head,
    widened,
)
from kl_term.plain_checks import check_choice
from kl_term.shapes import Axes


@checked(half="kept")
def top_k_divergence_from_hidden(
    hidden: Tensor,
    head: Head,
    ref_hidden: Tensor,
    ref_head: Head,
    *,
    top_k: int,
    direction: str = "reverse",
    support: str = "reference",
    correction: str = "tail",
    mask: Tensor | None = None,
    chunks: Chunks | None = None,
) -> Tensor:
    r""":func:`kl_term.kl.top_k.top_k_divergence` without a ``[tokens, vocab]`` tensor.

    .. math:: D = \sum_{a \in S} f\big(\log \pi_\theta(a), \log \pi_{\mathrm{ref}}(a)\big), \qquad
        \frac{\partial D}{\partial z_b} = [b \in S]\, g_b - \pi_\theta(b) \sum_{a \in S} g_a

    with :math:`g_a` the derivative of the sum by :math:`\log \pi_\theta(a)`.

    Equation: ``top_k_divergence_from_hidden``
    Gradient: exact for the set :math:`S` held fixed, by ``hidden`` and by the weight and bias of
        ``head``; the reference is constant.

    Args:
        hidden, head, ref_hidden, ref_head, mask, chunks: as
            :func:`kl_term.kl.chunked.divergences_from_hidden`.
        top_k, direction, support, correction: as :func:`kl_term.kl.top_k.top_k_divergence`.

    Returns:
        [...], nats, in float32 at least; 0 where masked.
    """
    check_pair(hidden, head, ref_hidden, ref_head)
    for name, value, names in (
        ("direction", direction, DIRECTIONS),
        ("support", support, SUPPORTS),
        ("correction", correction, CORRECTIONS),
    ):
        check_choice(name, value, names)
    check_top_k(top_k, len(head.weight))
    chunks = check_chunks(chunks)
    counted = counted_tokens(hidden, mask)
    own, reference = hidden[counted], ref_hidden.detach()[counted]
    correction = correction_of(correction, top_k, len(head.weight))
    with torch.no_grad(), as_declared(hidden):
        whose, of = (own, head) if support == "policy" else (reference, ref_head)
        tokens = largest_logits(whose, of, top_k, chunks, compute_dtype(whose, of.weight))
        ref_logp = log_probs_from_hidden(reference, ref_head, tokens, chunks=chunks)
    logp = log_probs_from_hidden(own, head, tokens, chunks=chunks)
    values = support_divergence(logp, ref_logp, direction=direction, correction=correction)
    return scattered(values, counted)


@checked(half="kept")
def log_probs_from_hidden(
    hidden: Tensor,
    head: Head,
    tokens: Annotated[Tensor, Axes("... V", "integers")],
    *,
    chunks: Chunks | None = None,
) -> Tensor:
    r"""Log-probs of some tokens at each state, without a ``[tokens, vocab]`` tensor.

    .. math:: \log \pi_\theta(a) = z_a - \log \sum_b e^{z_b}, \qquad
        z = (h W^\top + b) / \tau

    Equation: ``log_probs_from_hidden``

    Args:
        hidden: [..., d], last hidden states.
        head: the unembedding.
        tokens: [..., k], different ones in a row: a server's top k, or the sampled token alone.
        chunks: tokens and vocabulary entries at a time.

    Returns:
        [..., k], in float32 at least, with gradient.
    """
    check_head(hidden, head, "hidden", "head")
    if tokens.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"tokens has shape {tuple(tokens.shape)} but hidden {tuple(hidden.shape)}: they must "
            "be [..., k] and [..., d]"
        )
    flat = hidden.flatten(0, -2), tokens.flatten(0, -2).long()
    with as_declared(hidden):
        logp = _LogProbs.apply(flat[0], *head[:2], flat[1], head.temperature, check_chunks(chunks))
    return logp.view(tokens.shape)


class _LogProbs(torch.autograd.Function):
    """Of ``hidden [N, d]``, ``weight [V, d]`` and ``bias [V]``; the rest is constant."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float,
        chunks: Chunks,
    ) -> Tensor:
        dtype = compute_dtype(hidden, weight)
        head = Head(weight, bias, temperature)
        log_z = log_normaliser(hidden, head, chunks, dtype)
        logits = torch.empty(tokens.shape, dtype=dtype, device=hidden.device)
        for block in blocks(len(weight), chunks.vocab):
            wide = widened(head, block, dtype)
            for rows in blocks(len(hidden), chunks.tokens):
                place, inside = _places(tokens[rows], block)
                found = block_logits(hidden[rows].to(dtype), wide).gather(-1, place)
                logits[rows] = torch.where(inside, found, logits[rows])
        ctx.save_for_backward(hidden, weight, bias, tokens, log_z)
        ctx.constants = temperature, chunks, dtype
        return (logits.double() - log_z.unsqueeze(-1)).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logp: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, log_z = ctx.saved_tensors
        temperature, chunks, dtype = ctx.constants
        head = Head(weight, bias, temperature)

        def of_block(block: slice, wide: Head) -> Callable[[slice, Tensor], Tensor]:
            def by_logits(rows: slice, states: Tensor) -> Tensor:
                place, inside = _places(tokens[rows], block)
                given = by_logp[rows]
                policy = block_logits(states, wide).sub_(log_z[rows, None].to(dtype)).exp_()
                found = policy.mul_(-given.sum(-1, keepdim=True))
                return found.scatter_add_(-1, place, torch.where(inside, given, 0.0))

            return by_logits

        _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        with as_declared(hidden):
            found = through_head(
                hidden, head, chunks, dtype, of_block, weight=wants_weight, bias=wants_bias
            )
        return *found, None, None, None


def _places(tokens: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Where in a block of the vocabulary tokens lie, 0 for others, and which lie in it, [n, k]."""
    inside = (tokens >= block.start) & (tokens < block.stop)
    return torch.where(inside, tokens - block.start, 0), inside
