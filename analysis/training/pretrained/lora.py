r"""Products with frozen weights, and the low-rank adapters that are the only weights of a run.

.. math:: y_m = x_m W^\top + \frac{\alpha}{r}\, x_m A_m B_m

``W`` is frozen and shared, so its product is one large product over the rows of all runs; the
two thin products of the adapters are batched over runs. B starts at zero: a run is then
the frozen model to the bit.

Source: Hu et al. (2022), LoRA, equation 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from analysis.training.cpu import fast_products
from analysis.training.population import uniforms
from analysis.training.pretrained.config import LlamaConfig, LoraConfig

#: Named adapters [M, rows, columns]; empty means off.
Adapters = Mapping[str, Tensor]


class Lora:
    """The layout of one run's adapters in a row of weights [M, N]."""

    def __init__(self, config: LoraConfig, model: LlamaConfig) -> None:
        self.scale = config.alpha / config.rank
        self.seed = config.seed
        self.shapes: dict[str, tuple[int, int]] = {}
        for layer in range(model.num_layers):
            for target in config.targets:
                outs, ins = model.projection_shape(target)
                self.shapes[f"block{layer}.{target}.A"] = (ins, config.rank)
                self.shapes[f"block{layer}.{target}.B"] = (config.rank, outs)
        self.sizes = [math.prod(shape) for shape in self.shapes.values()]
        self.num_parameters = sum(self.sizes)

    def initial_weights(self, dtype: torch.dtype) -> Tensor:
        """[1, N]: A uniform within one over the root of its inputs, B zero."""
        parts = []
        for index, (name, (rows, columns)) in enumerate(self.shapes.items()):
            if name.endswith(".A"):
                drawn = uniforms(self.seed, "weights", index, (rows * columns,))
                parts.append((2.0 * drawn - 1.0) / math.sqrt(rows))
            else:
                parts.append(np.zeros(rows * columns))
        return torch.from_numpy(np.concatenate(parts)).to(dtype).unsqueeze(0)

    def unflatten(self, weights: Tensor) -> dict[str, Tensor]:
        """Named views [M, rows, columns] of weights [M, N]."""
        chunks = weights.split(self.sizes, dim=1)
        return {
            name: chunk.unflatten(1, shape)
            for (name, shape), chunk in zip(self.shapes.items(), chunks, strict=True)
        }

    def add(self, frozen: Tensor, x: Tensor, adapters: Adapters, name: str) -> Tensor:
        """The frozen output [M, R, out] of inputs [M, R, in], plus what the adapter adds to it."""
        if name + ".A" not in adapters:
            return frozen
        thin = torch.bmm(x, adapters[name + ".A"])  # (M, R, r)
        return torch.baddbmm(frozen, thin, adapters[name + ".B"], alpha=self.scale)


def frozen_product(x: Tensor, weight: Tensor) -> Tensor:
    """Outputs [M, R, out] of inputs [M, R, in] of all runs, ``weight`` [out, in] as stored."""
    return _FrozenProduct.apply(x, weight)


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.multiplications = x.shape[1] * weight.numel()  # of one run
        with fast_products(x.device, ctx.multiplications):
            return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with fast_products(gradient.device, ctx.multiplications):
            return gradient @ ctx.weight, None
