"""What tests share: small trees of sequences, numbers that are drawn, one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: Tokens of the trees.
VOCAB_SIZE = 3
#: (longest sequence, end token) of each: of fixed length, and ragged.
TREES = {"fixed": (3, None), "ragged": (4, 2)}

TIGHT = {"rtol": 0, "atol": 1e-12}


def draw(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Normal of mean 0, float64."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


@contextmanager
def on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
