"""How much noisier the gradient of a k3 loss is than that of a k2 loss."""

from __future__ import annotations

import torch
from torch import Tensor

from kl_term.kl.enumeration import gradient_moments


def noise_ratio(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """One sample's gradient variance (trace) under the k3 loss over that under the k2 loss; one,
    the limit, where policy and reference are equal."""
    k2, k3 = (gradient_moments(logits, ref_logits, estimator=k).trace_var for k in ("k2", "k3"))
    silent = (k2 <= 0) & (k3 <= 0)
    return torch.where(silent, 1.0, k3 / torch.where(silent, 1.0, k2))
