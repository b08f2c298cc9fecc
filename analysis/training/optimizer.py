"""One fused AdamW over the weights of all runs; each run clipped by its own gradient norm."""

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
    """AdamW on weights [M, N]; it is elementwise, so runs do not mix.

    The rows of frozen runs stay as they are, to the bit.
    """

    #: What it remembers of the steps so far: their number and two moments of the gradient.
    STATE = ("step", "exp_avg", "exp_avg_sq")

    def __init__(self, weights: Tensor, learning_rate: float, weight_decay: float) -> None:
        self.weights = weights
        self._none = torch.zeros(0, dtype=torch.long, device=weights.device)
        self._adamw = torch.optim.AdamW(
            [weights], lr=learning_rate, weight_decay=weight_decay, fused=True
        )

    @torch.no_grad()
    def step(self, gradient: Tensor, frozen: Tensor | None = None) -> None:
        """One step on a gradient [M, N], but for the ``frozen`` runs.

        Args:
            gradient: overwritten where it is theirs.
            frozen: their places, as integers: a mask would have to be read from the device. By
                default there are none.
        """
        frozen = self._none if frozen is None else frozen
        kept = self.weights[frozen]
        self.weights.grad = gradient.index_fill_(0, frozen, 0.0)
        self._adamw.step()
        self.weights.index_copy_(0, frozen, kept)

    def state(self) -> dict[str, Tensor]:
        """The tensors named in ``STATE``; none before the first step."""
        return dict(self._adamw.state[self.weights])

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a :meth:`state`."""
        self._adamw.state[self.weights] = {name: t.clone() for name, t in state.items()}
