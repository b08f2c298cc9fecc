"""k3 as it is usually coded."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """k3 as it is usually coded, in the type of its inputs: three large terms that cancel."""
    delta = ref_logp - logp
    return torch.exp(delta) - delta - 1
