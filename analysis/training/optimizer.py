"""One fused AdamW over the weights of all members; each member clipped by its own gradient norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Clipped(NamedTuple):
    """Gradients after clipping, and what they measured before."""

    gradient: Tensor  #: [M, N]
    norms: Tensor  #: [M], before clipping


def clip_rows(gradient: Tensor, max_norm: float) -> Clipped:
    """Scale each row [N] of a gradient [M, N] down to ``max_norm`` where it is longer."""
    norms = torch.linalg.vector_norm(gradient, dim=1)
    scale = (max_norm / norms.clamp(min=max_norm)).unsqueeze(1)
    return Clipped(gradient * scale, norms)


class PopulationAdamW:
    """AdamW on weights [M, N]; it is elementwise, so members do not mix.

    The rows of frozen members stay as they are, to the bit.
    """

    #: What it remembers of the steps so far: their number and two moments of the gradient.
    STATE = ("step", "exp_avg", "exp_avg_sq")

    def __init__(self, weights: Tensor, learning_rate: float, weight_decay: float) -> None:
        self.weights = weights
        self._adamw = torch.optim.AdamW(
            [weights], lr=learning_rate, weight_decay=weight_decay, fused=True
        )

    @torch.no_grad()
    def step(self, gradient: Tensor, alive: Tensor) -> None:
        """One step of the members that are ``alive`` [M]; the others' gradient is not read."""
        frozen = ~alive
        kept = self.weights[frozen].clone()
        self.weights.grad = torch.where(alive.unsqueeze(1), gradient, 0.0)
        self._adamw.step()
        self.weights[frozen] = kept

    def state(self) -> dict[str, Tensor]:
        """The tensors named in ``STATE``; none before the first step."""
        return dict(self._adamw.state[self.weights])

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a :meth:`state`."""
        self._adamw.state[self.weights] = {name: t.clone() for name, t in state.items()}
