"""Checks of tensors: one clear ``ValueError`` that names the argument and says what to do."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDE = (torch.float32, torch.float64)


def per_token_advantages(advantages: Tensor, like_name: str, like: Tensor) -> Tensor:
    """Advantages [...] (one a row) or [..., T] as [..., T], in at least float32."""
    check_float("advantages", advantages)
    advantages = at_least_float32(advantages)
    if advantages.shape == like.shape:
        return advantages
    if like.ndim > 0 and advantages.shape == like.shape[:-1]:
        return advantages.unsqueeze(-1).expand_as(like)
    packed = advantages.ndim == 1 and len(advantages) > like.shape[:-1].numel()
    raise ValueError(
        f"advantages has shape {tuple(advantages.shape)} but {like_name} has {tuple(like.shape)}: "
        f"give one a row, {tuple(like.shape[:-1])}, or one a token, {tuple(like.shape)}"
        + ("; where a row holds several sequences, give their sequence_ids" if packed else "")
    )


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


def check_probabilities(name: str, tensor: Tensor) -> None:
    """Refuse anything but floats in [0, 1]."""
    check_float(name, tensor)
    if not bool(((tensor >= 0) & (tensor <= 1)).all()):
        raise ValueError(f"{name} must hold probabilities, in [0, 1]")


def check_comes_first(name: str, counted: Tensor) -> None:
    """Refuse a mask [..., T] that counts a position after one that it leaves out."""
    if bool((counted[..., 1:] & ~counted[..., :-1]).any()):
        raise ValueError(f"{name} counts a position after a masked one: counted ones come first")


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half-precision inputs are computed (and returned) in float32; float64 stays float64."""
    if tensor.dtype in _WIDE:
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def default_float() -> torch.dtype:
    """Of results whose arguments hold no floats: torch's default, and at least float32."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def pair_of_floats(
    name: str, tensor: Tensor, other_name: str, other: Tensor
) -> tuple[Tensor, Tensor]:
    """Two floating-point tensors of equal shape, in a common dtype of at least float32."""
    alike = isinstance(tensor, Tensor) and isinstance(other, Tensor) and tensor.dtype in _WIDE
    if alike and tensor.dtype == other.dtype and tensor.shape == other.shape:
        return tensor, other
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
