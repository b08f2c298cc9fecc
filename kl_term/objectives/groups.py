r"""Statistics of a group of rewards, on the last axis, in float64.

Every deviation is taken after a shift by one run of the group. The mean of equal floats need
not equal them, but the mean of their differences is exactly zero, so a group of equal rewards has
deviations of exactly 0 in every dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_term.checks import checked
from kl_term.plain_checks import check_not_negative
from kl_term.shapes import Mask, Values


@checked
def deviations(values: Values, counted: Mask) -> Tensor:
    """Counted values minus their mean.

    Args:
        values: [..., N], any float dtype; detached here.
        counted: [..., N], bool.

    Returns:
        [..., N], float64; 0 where not counted.
    """
    values = values.detach().to(torch.float64)
    if values.shape[-1] == 0:
        return values
    run = values.gather(-1, counted.to(torch.uint8).argmax(dim=-1, keepdim=True))
    shifted = torch.where(counted, values - run, 0.0)
    mean = shifted.sum(dim=-1, keepdim=True) / _count(counted).clamp(min=1)
    return torch.where(counted, shifted - mean, 0.0)


@checked
def standardise(
    values: Values,
    counted: Mask,
    *,
    ddof: int,
    eps: float,
    std_min: float | None = None,
    std_max: float | None = None,
) -> Tensor:
    """Counted values minus their mean, over their clipped standard deviation plus ``eps``.

    Args:
        values: [..., N], any float dtype; detached here.
        counted: [..., N], bool.
        ddof: 0 divides the squares by their number, 1 by one less.
        eps: added to the standard deviation, at least 0.
        std_min: lower bound of the standard deviation, if any.
        std_max: upper bound of the standard deviation, if any.

    Returns:
        [..., N], float64; exactly 0 where not counted and where the counted values are equal.
    """
    _check_standardisation(ddof, eps, std_min, std_max)
    deviation = deviations(values, counted)
    degrees_of_freedom = (_count(counted) - ddof).clamp(min=1)
    std = (deviation.square().sum(dim=-1, keepdim=True) / degrees_of_freedom).sqrt()
    if std_min is not None or std_max is not None:
        std = std.clamp(std_min, std_max)
    scale = std + eps
    return deviation / torch.where(scale == 0, 1.0, scale)


def _count(counted: Tensor) -> Tensor:
    return counted.sum(dim=-1, keepdim=True)


def _check_standardisation(
    ddof: int, eps: float, std_min: float | None, std_max: float | None
) -> None:
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 or 1, got {ddof!r}")
    check_not_negative("eps", eps)
    if std_min is not None and not std_min >= 0:
        raise ValueError(f"std_min must be >= 0, got {std_min!r}")
    if std_max is not None and not std_max > 0:
        raise ValueError(f"std_max must be > 0, got {std_max!r}")
    if std_min is not None and std_max is not None and std_min > std_max:
        raise ValueError(f"std_min must not exceed std_max, got {std_min!r} > {std_max!r}")
