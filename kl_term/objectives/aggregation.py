r"""How per-token values become one number: a weight on each counted token.

Every mode is one function from a mask to weights :math:`w_{i,t}`, and the aggregate is
:math:`\sum_{i,t} w_{i,t}\, v_{i,t}`. The modes differ in how much a token of a long row weighs,
which is where the length bias of an objective comes from. The last axis holds tokens; every index
of the leading axes is a row. A weight depends on the mask alone, never on the values.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap

import torch
from torch import Tensor

from kl_term.checks import as_mask, at_least_float32, check_float, checked, default_float
from kl_term.kl.packing import Packing
from kl_term.plain_checks import check_choice
from kl_term.shapes import Mask, Tokens, Values, ZerosOnes


@checked
def aggregate(
    values: Values,
    mask: Mask,
    mode: str,
    *,
    sequence_ids: Tokens | None = None,
    sequences: int | None = None,
    width: int | None = None,
) -> Tensor:
    r"""Weighted sum of the counted values.

    .. math:: \mathrm{aggregate}(v) = \sum_{i,t} w_{i,t}\, v_{i,t}

    Equation: ``aggregate``
    Gradient: :math:`w_{i,t}` on every counted value, exactly zero on the others.

    Args:
        values: [..., T], per-token values in any unit.
        mask: [..., T], True = counted. What a masked position holds (NaN, ``-inf``) is ignored.
        mode: a name in :data:`MODES`.
        sequence_ids: [..., T] integers, where a row holds several sequences: see
            :mod:`kl_term.kl.packing`. Rows of a mode are then sequences.
        sequences: how many there are, where the last ones hold no token.
        width: the longest sequence allowed, which ``seq_mean_token_sum_norm`` divides by.

    Returns:
        A scalar in the unit of ``values``; exactly 0 when nothing is counted.

    Raises:
        ValueError: without the width that a mode reads, or with what goes unread.
    """
    check_float("values", values)
    if packing := packing_of(sequence_ids, mode, sequences, width):
        return aggregate(packing.pad(values), packing.counted(mask), mode)
    values = at_least_float32(values)
    counted = as_mask("mask", mask, "values", values)
    weights = token_weights(counted, mode, dtype=values.dtype)
    return (torch.where(counted, values, 0.0) * weights).sum()


@checked
def token_weights(
    mask: Mask,
    mode: str,
    *,
    dtype: torch.dtype | None = None,
    sequence_ids: Tokens | None = None,
    sequences: int | None = None,
    width: int | None = None,
) -> Values:
    """The weights that :func:`aggregate` applies, zero on masked positions.

    Args:
        mask: [..., T], True = counted.
        mode: a name in :data:`MODES`.
        dtype: of the result; the default floating dtype when omitted.
        sequence_ids, sequences, width: as in :func:`aggregate`.

    Returns:
        [..., T], dimensionless.

    Raises:
        ValueError: on a mask without a token axis; as :func:`aggregate`.
    """
    check_choice("mode", mode, MODES)
    if packing := packing_of(sequence_ids, mode, sequences, width):
        return packing.pack(token_weights(packing.counted(mask), mode, dtype=dtype))
    counted = as_mask("mask", mask, "mask", mask)
    if counted.ndim == 0:
        raise ValueError("mask must have a token axis: shape [..., T], got a scalar")
    return MODES[mode](counted.to(dtype or default_float()))


@checked
def token_mean(counted: ZerosOnes) -> Tensor:
    r"""Every counted token weighs the same, whatever row it is in.

    .. math:: w_{i,t} = \frac{m_{i,t}}{\sum_{j,s} m_{j,s}}

    Equation: ``token_mean``
    Source: Yu et al. (2025), DAPO, the token-level loss.

    Args:
        counted: [..., T], the mask :math:`m` as zeros and ones.

    Returns:
        [..., T], weights that sum to 1 (to 0 when nothing is counted).
    """
    return counted / counted.sum().clamp(min=1)


@checked
def seq_mean_token_mean(counted: ZerosOnes) -> Tensor:
    r"""Every row weighs the same: a token of a long row weighs less.

    .. math:: w_{i,t} = \frac{1}{N} \frac{m_{i,t}}{\sum_{s} m_{i,s}}

    An empty row adds zero and still counts in the number of rows :math:`N`.

    Equation: ``seq_mean_token_mean``
    Source: Shao et al. (2024), DeepSeekMath, the GRPO objective.

    Args, Returns: as :func:`token_mean`; the weights sum to the fraction of rows not empty.
    """
    return counted / (_num_rows(counted) * counted.sum(dim=-1, keepdim=True).clamp(min=1))


@checked
def seq_mean_token_sum(counted: ZerosOnes) -> Tensor:
    r"""Every row is summed, then rows are averaged: a long row weighs more.

    .. math:: w_{i,t} = \frac{m_{i,t}}{N}

    The policy gradient of a reward per sequence has this form.

    Equation: ``seq_mean_token_sum``

    Args, Returns: as :func:`token_mean`; the weights sum to the mean number of counted tokens.
    """
    return counted / _num_rows(counted)


@checked
def seq_mean_token_sum_norm(counted: ZerosOnes) -> Tensor:
    r"""Row sums over a constant, the width of the tensor: no length bias, scale of order one.

    .. math:: w_{i,t} = \frac{m_{i,t}}{N\, T}

    The constant is the width :math:`T`: pad to the longest completion *allowed*. The longest one
    *seen* depends on each completion, and a divisor that does is a weight on its length.

    Equation: ``seq_mean_token_sum_norm``
    Source: Liu et al. (2025), Dr. GRPO.

    Args, Returns: as :func:`token_mean`; the weights sum to the fraction of positions counted.
    """
    return counted / (_num_rows(counted) * max(counted.shape[-1], 1))


#: Aggregation modes by name, without their guard: :func:`token_weights` gives them zeros and ones.
MODES: dict[str, Callable[[Tensor], Tensor]] = {
    mode.__name__: unwrap(mode)
    for mode in (
        token_mean,
        seq_mean_token_mean,
        seq_mean_token_sum,
        seq_mean_token_sum_norm,
    )
}


@checked
def token_mean_weight(length_probability: Tensor, completions: int) -> Tensor:
    r"""What :func:`token_mean` makes of a completion in expectation: a weight of its own length.

    .. math:: \mathbb{E}\Big[\frac{\sum_{i,t} v_{i,t}}{\sum_i T_i}\Big]
        = \mathbb{E}\Big[w_N(T) \sum_t v_t\Big], \qquad
        w_N(t) = \mathbb{E}\Big[\frac{N}{t + T_2 + \dots + T_N}\Big]

    for independent completions of lengths :math:`T_i`. :math:`w_1(t) = 1/t` is
    :func:`seq_mean_token_mean`; as N grows the weight tends to :math:`1/\mathbb{E}[T]`, a constant.

    Equation: ``token_mean_weight``

    Args:
        length_probability: [L + 1], of the lengths 0 to L; they sum to one.
        completions: :math:`N`, completions whose tokens are counted together, at least 1.

    Returns:
        [L + 1], per token, at each length :math:`t`; nothing counted divides by 1, as in a batch.
    """
    check_float("length_probability", length_probability)
    if length_probability.ndim != 1 or completions < 1:
        raise ValueError(
            "need length_probability [L + 1] and completions >= 1, got "
            f"{tuple(length_probability.shape)} and {completions!r}"
        )
    longest = len(length_probability) - 1  # powers of a thousand lose every digit of float32
    size = longest * completions + 1
    powers = torch.fft.rfft(length_probability.double(), size) ** (completions - 1)
    others = torch.fft.irfft(powers, size)  # probability of each total length of the other N - 1
    total = torch.arange(longest + 1).unsqueeze(-1) + torch.arange(size)
    weights = (completions * others / total.clamp(min=1)).sum(dim=-1)
    return weights.to(length_probability.dtype)


def packing_of(
    ids: Tensor | None, mode: str, sequences: int | None, width: int | None
) -> Packing | None:
    """The packing of rows that hold several sequences, or None; refuses what would go unread."""
    if ids is None:
        if sequences is not None or width is not None:
            raise ValueError("sequences and width are of packed rows: give their sequence_ids")
        return None
    if mode == "seq_mean_token_sum_norm" and width is None:
        raise ValueError(
            "width is needed: seq_mean_token_sum_norm divides by the longest sequence allowed, "
            "which packed rows do not show"
        )
    return Packing(ids, sequences=sequences, width=width)


def _num_rows(counted: Tensor) -> int:
    """Rows of a [..., T] tensor, at least 1; a single row has no leading axis."""
    return max(counted.shape[:-1].numel(), 1)
