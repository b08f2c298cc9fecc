"""Columns of a dump as tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def tensor_of(column: np.ndarray) -> Tensor:
    """The column itself where torch may write to it, else a copy: torch knows no other memory."""
    return torch.from_numpy(np.require(column, requirements="W"))
