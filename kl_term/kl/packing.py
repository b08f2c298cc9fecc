"""Several sequences in one row of tokens, as trainers pack them to compute on no padding.

A row does not say where a sequence ends, so whoever packed it does: by ``sequence_ids``, a number
a token. What looks across tokens is then computed on the sequences padded to the longest one, a
row each: value and gradient are those of the padded batch to the last bit, and so is the memory,
``sequences * longest`` numbers in place of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kl_term.checks import checked
from kl_term.shapes import Mask, Tokens, Values


@checked
def sequence_ids(*, cu_seqlens: Tensor | None = None, position_ids: Tokens | None = None) -> Tensor:
    r"""The number of the sequence that each token of a packed row belongs to.

    .. math:: \mathrm{id}_n = \big|\{s \ge 1 : \mathrm{cu}_s \le n\}\big| \quad\text{or}\quad
        \big|\{m \le n : \mathrm{pos}_m = 0\}\big| - 1

    Args:
        cu_seqlens: [S + 1] integers, where each sequence begins and the last one ends, as
            FlashAttention takes them; of an empty sequence the number is skipped.
        position_ids: [..., T], each sequence's own places, beginning at 0 with every one of them;
            an empty sequence leaves no trace.

    Returns:
        [N] long, or [..., T] of the positions, counted on from row to row.

    Raises:
        ValueError: not one of the two, or ends that do not rise from 0, or a row that does not
            begin at 0.
    """
    if (cu_seqlens is None) == (position_ids is None):
        raise ValueError("give cu_seqlens or position_ids, one of them")
    if position_ids is not None:
        if position_ids.ndim == 0 or bool((position_ids[..., :1] != 0).any()):
            raise ValueError("position_ids must begin at 0 in each row [..., T]")
        return (position_ids == 0).flatten().cumsum(0).reshape(position_ids.shape) - 1
    assert cu_seqlens is not None
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens must be [S + 1] integers, got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    lengths = cu_seqlens.long().diff()
    if bool(cu_seqlens[0] != 0) or bool((lengths < 0).any()):
        raise ValueError("cu_seqlens must begin at 0 and not fall")
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)


class Packing:
    """Which token of packed rows stands where in the padded batch [S, L].

    Args:
        ids: [..., T] integers, one number a sequence over all rows, its tokens side by side in
            order; negative = of no sequence, such as the padding at the end of a row.
        sequences: S, where the last ones are empty; None = the largest number and one.
        width: L, the longest sequence allowed; None = the longest one seen.

    Raises:
        ValueError: the tokens of a number are not together, or more than it says.
    """

    def __init__(self, ids: Tensor, *, sequences: int | None = None, width: int | None = None):
        if ids.ndim == 0:
            raise ValueError("sequence_ids must have a token axis: shape [..., T], got a scalar")
        self.shape, flat = ids.shape, ids.flatten().long()
        self.kept = (flat >= 0).nonzero().squeeze(-1)
        self.row = flat[self.kept]
        found = int(self.row.max()) + 1 if len(self.row) else 0
        self.sequences = found if sequences is None else sequences
        if self.sequences < found:
            raise ValueError(f"sequences is {sequences}, but sequence_ids go to {found - 1}")
        begins = torch.ones_like(self.row, dtype=torch.bool)
        line = self.kept // max(ids.shape[-1], 1)
        begins[1:] = (self.row.diff() != 0) | (line.diff() != 0)
        first = begins.nonzero().squeeze(-1)
        lengths = torch.bincount(self.row, minlength=self.sequences)
        if len(first) != int((lengths > 0).sum()):
            raise ValueError(
                "sequence_ids: the tokens of a sequence must stand side by side in one row; "
                "number the sequences on from row to row"
            )
        start = torch.zeros(self.sequences, dtype=torch.long, device=ids.device)
        start[self.row[first]] = first
        self.place = torch.arange(len(self.row), device=ids.device) - start[self.row]
        longest = int(lengths.max()) if len(lengths) else 0
        self.width = longest if width is None else width
        if self.width < longest:
            raise ValueError(f"width is {width}, but a sequence has {longest} tokens")

    def pad(self, values: Tensor) -> Tensor:
        """[..., T] as [S, L], zero after the end of a sequence."""
        padded = values.new_zeros(self.sequences, self.width)
        return padded.index_put((self.row, self.place), values.flatten()[self.kept])

    def pad_advantages(self, advantages: Tensor) -> Tensor:
        """[S], one a sequence number, as they are; [..., T] padded.

        Raises:
            ValueError: neither.
        """
        if advantages.shape == self.shape:
            return self.pad(advantages)
        if advantages.shape != (self.sequences,):
            raise ValueError(
                f"advantages has shape {tuple(advantages.shape)}: give one a sequence, "
                f"({self.sequences},), or one a token, {tuple(self.shape)}"
            )
        return advantages

    def counted(self, mask: Tensor | None) -> Tensor:
        """[S, L] bool, True = a token of a sequence, and counted."""
        ones = torch.ones(self.shape, dtype=torch.bool, device=self.row.device)
        return self.pad(ones if mask is None else mask.bool())

    def pack(self, padded: Tensor) -> Tensor:
        """[S, L] as [..., T], zero where a token is of no sequence."""
        flat = padded.new_zeros(self.shape.numel())
        return flat.index_put((self.kept,), padded[self.row, self.place]).reshape(self.shape)


def by_sequence(
    function: Callable[..., Tensor], ids: Tensor, mask: Mask | None, **tensors: Values | None
) -> Tensor:
    """What a function of padded rows and a mask says of packed ones; [S] if it says one a row."""
    packing = Packing(ids)
    padded = {name: packing.pad(t) for name, t in tensors.items() if t is not None}
    result = function(**padded, mask=packing.counted(mask))
    return packing.pack(result) if result.ndim == 2 else result
