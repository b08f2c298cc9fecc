r"""Rotary positions: each pair of channels turns by an angle that grows with the position.

.. math:: \mathrm{angle}_i(t) = t\, \theta^{-2i/D}, \qquad i < D/2

The pairs are channels i and i + D/2 of a head, the order in which Llama checkpoints are stored.

Source: Su et al. (2021), RoFormer, section 3.2.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Cosines and sines [..., T, D/2] of the angles at some positions."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """The rotation at integer positions [..., T]; ``dtype`` is float32 or wider."""
    channels = torch.arange(0, head_dim, 2, device=positions.device).to(dtype)
    inverse = 1.0 / (theta ** (channels / head_dim))  # (D/2,)
    angles = positions.unsqueeze(-1).to(dtype) * inverse
    return Rotation(angles.cos(), angles.sin())


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Turn heads [..., T, D]; the rotation must broadcast against the first half of them."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * by.cos - second * by.sin, second * by.cos + first * by.sin], dim=-1)
