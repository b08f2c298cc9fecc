"""Argument checks: one clear ``ValueError`` that names the argument and says what to do.

Only shapes, dtypes and names are checked. Values are not: that would cost a device
synchronisation per call, and a non-finite log-prob must stay visible to the trainer. The one
exception is a mask of numbers, which must be 0 or 1; a boolean mask costs nothing.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

import torch
from torch import Tensor


def check_float(name: str, tensor: Tensor) -> None:
    """Refuse anything but a floating-point tensor."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor, got {tensor.dtype}")


def check_same_shape(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse two tensors whose shapes differ: nothing broadcasts silently here."""
    if tensor.shape != other.shape:
        raise ValueError(
            f"{other_name} has shape {tuple(other.shape)} but {name} has {tuple(tensor.shape)}: "
            "they must be equal (expand explicitly if you mean to broadcast)"
        )


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Refuse an unknown option; suggest the nearest known one."""
    known = list(choices)
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} must be one of {known}, got {value!r}{hint}")


def check_positive(name: str, value: float) -> None:
    """Refuse a number that is not finite and above zero."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and > 0, got {value!r}")


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half-precision inputs are computed (and returned) in float32; float64 stays float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def pair_of_floats(
    name: str, tensor: Tensor, other_name: str, other: Tensor
) -> tuple[Tensor, Tensor]:
    """Two floating-point tensors of equal shape, in a common dtype of at least float32."""
    check_float(name, tensor)
    check_float(other_name, other)
    check_same_shape(name, tensor, other_name, other)
    dtype = torch.promote_types(torch.promote_types(tensor.dtype, other.dtype), torch.float32)
    return tensor.to(dtype), other.to(dtype)


def as_mask(name: str, mask: Tensor, like_name: str, like: Tensor) -> Tensor:
    """A boolean mask (True = counted) of the shape of ``like``; tensors of 0 and 1 are accepted."""
    if not isinstance(mask, Tensor):
        raise ValueError(f"{name} must be a torch tensor, got {type(mask).__name__}")
    check_same_shape(like_name, like, name, mask)
    if mask.dtype == torch.bool:
        return mask
    counted = mask == 1
    other = ~(counted | (mask == 0))
    if other.any():
        raise ValueError(f"{name} must hold 0 or 1, got {mask[other][0].item()!r}: True = counted")
    return counted
