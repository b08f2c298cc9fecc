r"""Walking through logits in blocks: the sums over a vocabulary that no logit needs to outlive.

What the divergences need of the logits are normalisers and means. They are kept relative to a
running maximum :math:`m`, block :math:`C` by block:

.. math:: m' = \max(m, \max_{a \in C} z_a), \qquad
    S' = S\, e^{m - m'} + \sum_{a \in C} f_a\, e^{z_a - m'}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Head(NamedTuple):
    """What turns hidden states into logits, which must be finite."""

    weight: Tensor  #: [V, d], the unembedding
    bias: Tensor | None = None  #: [V]
    temperature: float = 1.0  #: logits are divided by it


class Chunks(NamedTuple):
    """How the work is cut; the result does not depend on it, up to rounding."""

    tokens: int = 512
    vocab: int = 4096


#: What gives the gradient by the logits of a block of the vocabulary, for rows of states.
OfBlock = Callable[[slice, Head], Callable[[slice, Tensor], Tensor]]


class Statistics(NamedTuple):
    """Sums over the vocabulary, per token [N], in float64."""

    log_z: Tensor  #: log-normaliser of the policy
    ref_log_z: Tensor  #: of the reference
    mean_gap: Tensor  #: mean of ``z - z_ref`` under the policy
    ref_mean_gap: Tensor  #: mean of ``z - z_ref`` under the reference
    mean_logit: Tensor  #: mean of ``z`` under the policy


def statistics(
    hidden: Tensor,
    head: Head,
    ref_hidden: Tensor,
    ref_head: Head,
    chunks: Chunks,
    dtype: torch.dtype,
) -> Statistics:
    """One walk through the vocabulary; logits exist for one block of tokens and vocabulary."""
    policy = _Running(len(hidden), 3, hidden.device)
    reference = _Running(len(hidden), 2, hidden.device)
    for block in blocks(len(head.weight), chunks.vocab):
        wide, ref_wide = widened(head, block, dtype), widened(ref_head, block, dtype)
        for rows in blocks(len(hidden), chunks.tokens):
            logits = block_logits(hidden[rows].to(dtype), wide)
            ref_logits = block_logits(ref_hidden[rows].to(dtype), ref_wide)
            gap = logits - ref_logits
            policy.add(rows, logits, [gap, logits])
            reference.add(rows, ref_logits, [gap])
    mean_gap, mean_logit = policy.means()
    (ref_mean_gap,) = reference.means()
    return Statistics(
        policy.log_normaliser(), reference.log_normaliser(), mean_gap, ref_mean_gap, mean_logit
    )


def log_normaliser(hidden: Tensor, head: Head, chunks: Chunks, dtype: torch.dtype) -> Tensor:
    """[N], in float64: one walk through the vocabulary of one policy."""
    policy = _Running(len(hidden), 1, hidden.device)
    for block in blocks(len(head.weight), chunks.vocab):
        wide = widened(head, block, dtype)
        for rows in blocks(len(hidden), chunks.tokens):
            policy.add(rows, block_logits(hidden[rows].to(dtype), wide), [])
    return policy.log_normaliser()


def largest_logits(
    hidden: Tensor, head: Head, count: int, chunks: Chunks, dtype: torch.dtype
) -> Tensor:
    """[N, count], the tokens of the largest logits in any order; of equal ones the lower index."""
    found = torch.empty(len(hidden), count, dtype=torch.long, device=hidden.device)
    for rows in blocks(len(hidden), chunks.tokens):
        tokens = hidden[rows].to(dtype)
        values = tokens.new_empty(len(tokens), 0)
        indices = found.new_empty(len(tokens), 0)
        for block in blocks(len(head.weight), chunks.vocab):
            logits = block_logits(tokens, widened(head, block, dtype))
            own = torch.arange(block.start, block.start + logits.shape[1], device=hidden.device)
            values = torch.cat([values, logits], -1)
            indices = torch.cat([indices, own.expand(len(tokens), -1)], -1)
            order = _largest(values, count)
            values, indices = values.gather(-1, order), indices.gather(-1, order)
        found[rows] = indices
    return found


def through_head(
    hidden: Tensor,
    head: Head,
    chunks: Chunks,
    dtype: torch.dtype,
    of_block: OfBlock,
    *,
    weight: bool,
    bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients by ``hidden`` [N, d] and by the head of what has one by the logits.

    Args:
        of_block: from a slice of the vocabulary and the widened head there to a function of rows
            and their widened states [n, d], which gives the gradient by the logits [n, v]. It is
            overwritten.
        weight, bias: whether that one is wanted; None in its place else.
    """
    by_hidden = torch.zeros_like(hidden, dtype=dtype)
    by_weight = torch.empty_like(head.weight) if weight else None
    by_bias = None if head.bias is None or not bias else torch.empty_like(head.bias)
    for block in blocks(len(head.weight), chunks.vocab):
        wide = widened(head, block, dtype)
        by_logits_of = of_block(block, wide)
        of_weight = torch.zeros_like(wide.weight)
        of_bias = of_weight.new_zeros(len(of_weight))
        for rows in blocks(len(hidden), chunks.tokens):
            states = hidden[rows].to(dtype)
            by_logits = by_logits_of(rows, states).div_(head.temperature)
            by_hidden[rows] += by_logits @ wide.weight
            if by_weight is not None:
                of_weight.addmm_(by_logits.T, states)
            if by_bias is not None:
                of_bias += by_logits.sum(0)
        if by_weight is not None:
            by_weight[block] = of_weight.to(by_weight.dtype)
        if by_bias is not None:
            by_bias[block] = of_bias.to(by_bias.dtype)
    return by_hidden.to(hidden.dtype), by_weight, by_bias


def blocks(length: int, size: int) -> Iterator[slice]:
    """Slices of ``size`` that cover ``range(length)``; the last may be shorter."""
    return (slice(start, start + size) for start in range(0, length, size))


def widened(head: Head, block: slice, dtype: torch.dtype) -> Head:
    """The part of a head for one block of the vocabulary, in the type of the computation."""
    bias = None if head.bias is None else head.bias[block].to(dtype)
    return Head(head.weight[block].to(dtype), bias, head.temperature)


def block_logits(tokens: Tensor, head: Head) -> Tensor:
    """A fresh [n, v], free to be overwritten."""
    if head.bias is None:
        logits = tokens @ head.weight.T
    else:
        logits = torch.addmm(head.bias, tokens, head.weight.T)
    return logits if head.temperature == 1.0 else logits.div_(head.temperature)


def _largest(values: Tensor, count: int) -> Tensor:
    """[N, count or fewer]; of equal values the first, which only a slower sort can say."""
    best = values.topk(min(count + 1, values.shape[-1]), dim=-1)
    if len(best.values.T) <= count:
        return best.indices
    if (best.values[:, count - 1] > best.values[:, count]).all():
        return best.indices[:, :count]
    return values.argsort(dim=-1, descending=True, stable=True)[:, :count]


class _Running:
    """Sums of ``e^z f`` over the vocabulary so far, relative to the largest logit so far."""

    def __init__(self, tokens: int, sums: int, device: torch.device) -> None:
        self.largest = torch.full((tokens,), -torch.inf, dtype=torch.float64, device=device)
        self.sums = torch.zeros(sums, tokens, dtype=torch.float64, device=device)

    def add(self, rows: slice, logits: Tensor, factors: list[Tensor]) -> None:
        """Take in one block of logits [n, v], and of it the sums of 1 and of each factor."""
        largest = torch.maximum(self.largest[rows], logits.amax(-1).double())
        scale = (self.largest[rows] - largest).exp()
        weights = logits.sub(largest.to(logits.dtype).unsqueeze(-1)).exp_()
        block = [weights.sum(-1), *(torch.linalg.vecdot(weights, f) for f in factors)]
        self.sums[:, rows] = self.sums[:, rows] * scale + torch.stack(block).double()
        self.largest[rows] = largest

    def log_normaliser(self) -> Tensor:
        return self.largest + self.sums[0].log()

    def means(self) -> Tensor:
        return self.sums[1:] / self.sums[0]
