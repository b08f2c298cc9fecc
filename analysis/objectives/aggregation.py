r"""How per-token values become one number: a weight on each counted token.

Every mode is one function from a mask to weights :math:`w_{i,t}`, and the aggregate is
:math:`\sum_{i,t} w_{i,t}\, v_{i,t}`. The modes differ in how much a token of a long row weighs,
which is where the length bias of an objective comes from. The last axis holds tokens; every index
of the leading axes is a row. A weight depends on the mask alone, never on the values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from analysis.checks import as_mask, at_least_float32, check_choice, check_float
from analysis.shapes import Mask, Values


def aggregate(values: Values, mask: Mask, mode: str) -> Tensor:
    r"""Weighted sum of the counted values.

    .. math:: \mathrm{aggregate}(v) = \sum_{i,t} w_{i,t}\, v_{i,t}

    Equation: ``aggregate``
    Gradient: :math:`w_{i,t}` on every counted value, exactly zero on the others.

    Args:
        values: [..., T], per-token values in any unit.
        mask: [..., T], True = counted. What a masked position holds (NaN, ``-inf``) is ignored.
        mode: a name in :data:`MODES`.

    Returns:
        A scalar in the unit of ``values``; exactly 0 when nothing is counted.

    Raises:
        ValueError: on an unknown mode, a shape mismatch or values that are not floating point.
    """
    check_float("values", values)
    values = at_least_float32(values)
    counted = as_mask("mask", mask, "values", values)
    weights = token_weights(counted, mode, dtype=values.dtype)
    return (torch.where(counted, values, 0.0) * weights).sum()


def token_weights(mask: Mask, mode: str, *, dtype: torch.dtype | None = None) -> Values:
    """The weights that :func:`aggregate` applies, zero on masked positions.

    Args:
        mask: [..., T], True = counted.
        mode: a name in :data:`MODES`.
        dtype: of the result; the default floating dtype when omitted.

    Returns:
        [..., T], dimensionless.

    Raises:
        ValueError: on an unknown mode or a mask without a token axis.
    """
    check_choice("aggregation", mode, MODES)
    counted = as_mask("mask", mask, "mask", mask)
    if counted.ndim == 0:
        raise ValueError("mask must have a token axis: shape [..., T], got a scalar")
    return MODES[mode](counted.to(dtype or torch.get_default_dtype()))


def token_mean(counted: Tensor) -> Tensor:
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


def seq_mean_token_mean(counted: Tensor) -> Tensor:
    r"""Every row weighs the same: a token of a long row weighs less.

    .. math:: w_{i,t} = \frac{1}{N} \frac{m_{i,t}}{\sum_{s} m_{i,s}}

    An empty row adds zero and still counts in the number of rows :math:`N`.

    Equation: ``seq_mean_token_mean``
    Source: Shao et al. (2024), DeepSeekMath, the GRPO objective.

    Args, Returns: as :func:`token_mean`; the weights sum to the fraction of rows not empty.
    """
    return counted / (_num_rows(counted) * counted.sum(dim=-1, keepdim=True).clamp(min=1))


def seq_mean_token_sum(counted: Tensor) -> Tensor:
    r"""Every row is summed, then rows are averaged: a long row weighs more.

    .. math:: w_{i,t} = \frac{m_{i,t}}{N}

    The policy gradient of a reward per sequence has this form.

    Equation: ``seq_mean_token_sum``

    Args, Returns: as :func:`token_mean`; the weights sum to the mean number of counted tokens.
    """
    return counted / _num_rows(counted)


def seq_mean_token_sum_norm(counted: Tensor) -> Tensor:
    r"""Row sums over a constant, the width of the tensor: no length bias, scale of order one.

    .. math:: w_{i,t} = \frac{m_{i,t}}{N\, T}

    The constant is the width :math:`T`: pad to the longest completion *allowed*, not to the
    longest one seen, for a scale that does not move between batches.

    Equation: ``seq_mean_token_sum_norm``
    Source: Liu et al. (2025), Dr. GRPO.

    Args, Returns: as :func:`token_mean`; the weights sum to the fraction of positions counted.
    """
    return counted / (_num_rows(counted) * max(counted.shape[-1], 1))


#: Aggregation modes by name.
MODES: dict[str, Callable[[Tensor], Tensor]] = {
    mode.__name__: mode
    for mode in (
        token_mean,
        seq_mean_token_mean,
        seq_mean_token_sum,
        seq_mean_token_sum_norm,
    )
}


def _num_rows(counted: Tensor) -> int:
    """Rows of a [..., T] tensor, at least 1; a single row has no leading axis."""
    return max(counted.shape[:-1].numel(), 1)
