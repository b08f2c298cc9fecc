"""The shapes that cross function boundaries, by name.

With jaxtyping installed (the ``test`` extra) the aliases carry shapes that beartype checks in the
tests; without it they are plain tensors, so the package imports with torch and numpy alone.
"""

from __future__ import annotations

from torch import Tensor

try:
    from jaxtyping import Float, Shaped
except ImportError:  # a bare GPU box
    Logits = Values = LogProbs = Mask = Rewards = Tensor
else:
    Logits = Float[Tensor, "*batch vocab"]
    Values = Float[Tensor, "*batch"]
    LogProbs = Float[Tensor, "*batch"]
    Mask = Shaped[Tensor, "*batch"]
    Rewards = Float[Tensor, "*batch group"]

__all__ = ["LogProbs", "Logits", "Mask", "Rewards", "Values"]
