"""Pre-drawn uniforms, keyed by what they are for, so that no member's luck depends on another's.

A draw is a function of (member seed, stream, update) alone: not of the population's size, of the
member's place in it, or of what was drawn before. Two arms with one seed therefore see the same
prompts and the same sampling noise (common random numbers), which makes their difference sharper
than two independent runs would.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

#: What a draw is for; each purpose has its own stream.
STREAMS = {"weights": 0, "start": 1, "prompts": 2, "sampling": 3, "noise": 4, "fillers": 5}


def uniforms(seed: int, stream: str, update: int, shape: Sequence[int]) -> np.ndarray:
    """Uniforms in [0, 1) for one seed, stream and update: float64, of the given shape."""
    key = np.random.SeedSequence([seed, STREAMS[stream], update])
    return np.random.Generator(np.random.Philox(key)).random(tuple(shape))


def member_uniforms(
    seeds: Sequence[int], stream: str, update: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """[M, *shape]: the uniforms of each member; members of equal seed share them."""
    drawn = {seed: uniforms(seed, stream, update, shape) for seed in set(seeds)}
    return torch.from_numpy(np.stack([drawn[seed] for seed in seeds])).to(dtype)
