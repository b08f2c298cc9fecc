"""Products with frozen weights: no gradient for the weights, and the fast library both ways."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from analysis.training.products import fast_products


def frozen_product(x: Tensor, weight: Tensor) -> Tensor:
    """Outputs [M, R, out] of inputs [M, R, in] of all members, ``weight`` [out, in] as stored."""
    return _FrozenProduct.apply(x, weight)


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.multiplications = x.shape[1] * weight.numel()  # of one member
        with fast_products(x.device, ctx.multiplications):
            return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with fast_products(gradient.device, ctx.multiplications):
            return gradient @ ctx.weight, None
