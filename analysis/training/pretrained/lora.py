r"""Products with frozen weights, and the low-rank adapters that are the only weights of a run.

.. math:: y_m = x_m W^\top + \frac{\alpha}{r}\, x_m A_m B_m

``W`` is frozen and shared, so its product is one large product over the rows of all runs; the
two thin products of the adapters are batched over runs. B starts at zero: a run is then
the frozen model to the bit.

Projections that read the same input are one such product: their ``W`` one above the other, their
``A`` side by side, their ``B`` on the diagonal of a matrix of blocks.

Source: Hu et al. (2022), LoRA, equation 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from analysis.records.language import GROUPS, PROJECTIONS, LlamaConfig, LoraConfig
from analysis.training.cpu import fast_products
from analysis.training.population import uniforms

#: Named adapters [M, layers, rows, columns]; empty means off.
Adapters = Mapping[str, Tensor]
#: Of one layer: group of projections -> A [M, in, r'] and B [M, r', out], scaled.
LayerAdapters = Mapping[str, tuple[Tensor, Tensor]]


class Lora:
    """The layout of one run's adapters in a row of weights [M, N]: layer by layer."""

    def __init__(self, config: LoraConfig, model: LlamaConfig) -> None:
        self.scale = config.alpha / config.rank
        self.seed = config.seed
        self.num_layers = model.num_layers
        self.outs: dict[str, int] = {n: model.projection_shape(n)[0] for n in PROJECTIONS}
        #: In each layer.
        self.shapes: dict[str, tuple[int, int]] = {}
        for target in config.targets:
            outs, ins = model.projection_shape(target)
            self.shapes[f"{target}.A"] = (ins, config.rank)
            self.shapes[f"{target}.B"] = (config.rank, outs)
        self.sizes = [math.prod(shape) for shape in self.shapes.values()]
        self.num_parameters = self.num_layers * sum(self.sizes)

    def initial_weights(self, dtype: torch.dtype) -> Tensor:
        """[1, N]: A uniform within one over the root of its inputs, B zero."""
        parts = []
        for index, (name, (rows, columns)) in enumerate([*self.shapes.items()] * self.num_layers):
            if name.endswith(".A"):
                drawn = uniforms(self.seed, "weights", index, (rows * columns,))
                parts.append((2.0 * drawn - 1.0) / math.sqrt(rows))
            else:
                parts.append(np.zeros(rows * columns))
        return torch.from_numpy(np.concatenate(parts)).to(dtype).unsqueeze(0)

    def unflatten(self, weights: Tensor) -> dict[str, Tensor]:
        """Named views [M, layers, rows, columns] of weights [M, N]."""
        chunks = weights.unflatten(1, (self.num_layers, -1)).split(self.sizes, dim=2)
        return {
            name: chunk.unflatten(2, shape)
            for (name, shape), chunk in zip(self.shapes.items(), chunks, strict=True)
        }

    def by_layer(self, adapters: Adapters) -> Sequence[LayerAdapters]:
        """The adapters of each group of projections as those of one product."""
        merged = {}
        for group, projections in GROUPS.items():
            adapted = [name for name in projections if f"{name}.A" in adapters]
            if adapted:
                a = torch.cat([adapters[f"{name}.A"] for name in adapted], dim=-1)
                b = torch.cat([self._block(adapters, name, projections) for name in adapted], dim=2)
                merged[group] = list(zip(a.unbind(1), b.unbind(1), strict=True))
        return [
            {g: pairs[layer] for g, pairs in merged.items()} for layer in range(self.num_layers)
        ]

    def _block(self, adapters: Adapters, name: str, projections: Sequence[str]) -> Tensor:
        """B of one projection in its columns [M, layers, r, out] of the group's, scaled."""
        place = projections.index(name)
        before = sum(self.outs[other] for other in projections[:place])
        after = sum(self.outs[other] for other in projections[place + 1 :])
        return F.pad(self.scale * adapters[f"{name}.B"], (before, after))


def product(x: Tensor, weight: Tensor, adapter: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Outputs [M, R, out] of inputs [M, R, in] of all runs.

    Args:
        weight: [out, in], frozen, as stored; the product with it has its type.
        adapter: A [M, in, r] and B [M, r, out], if there is one; in the type of ``x``.
    """
    return _Product.apply(x, weight, *(adapter or (None, None)))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
        ctx.weight = weight
        ctx.multiplications = x.shape[1] * weight.numel()  # of one run
        with fast_products(x.device, ctx.multiplications):
            y = F.linear(x.to(weight.dtype), weight).to(x.dtype)
        if a is None or b is None:
            return y
        thin = torch.bmm(x, a)  # (M, R, r)
        ctx.save_for_backward(x, thin, a, b)
        return y.baddbmm_(thin, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with fast_products(gradient.device, ctx.multiplications):
            of_x = (gradient.to(ctx.weight.dtype) @ ctx.weight).to(gradient.dtype)
        if not ctx.saved_tensors:
            return of_x, None, None, None
        x, thin, a, b = ctx.saved_tensors
        of_thin = torch.bmm(gradient, b.mT)
        of_x.baddbmm_(of_thin, a.mT)
        return of_x, None, torch.bmm(x.mT, of_thin), torch.bmm(thin.mT, gradient)
