"""How far gradients are from the exact ones, as one figure of a claim."""

from __future__ import annotations

from torch import Tensor

from analysis.kl.enumeration import relative_error


def error_of(gradient: Tensor, exact: Tensor, *, worst: bool = False) -> float:
    """Median relative error over the rows of [N, V] and [N, V], or the largest."""
    errors = relative_error(gradient, exact)
    return (errors.max() if worst else errors.median()).item()
