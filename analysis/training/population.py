"""Runs side by side: grouped by what they compute, each with random numbers of its own.

Every group is one batched call on its own rows. Where all runs share a key there is one group,
its rows are a slice, and nothing is copied.

Random numbers are drawn before they are needed, as a function of (run seed, stream, update)
alone: not of the population's size, of the run's place in it, or of what was drawn before. Two
variants with one seed therefore see the same prompts and the same sampling noise (common random
numbers), which makes their difference sharper than two independent runs would.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)
Rows = slice | Tensor


class Group(NamedTuple):
    """Runs that share a key."""

    key: Any
    rows: Rows  #: their places in the population: index a tensor [M, ...] with it
    size: int


class Groups(Generic[Key]):
    """The groups of a population, in the order of their first runs.

    Args:
        keys: one a run.
        device: of the tensors that are indexed.
    """

    def __init__(self, keys: Sequence[Key], device: torch.device) -> None:
        places: dict[Key, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(key, []).append(place)
        self._groups: list[Group] = []
        self._inverse: Tensor | None = None
        if len(places) == 1:
            self._groups = [Group(keys[0], slice(None), len(keys))]
            return
        for key, rows in places.items():
            self._groups.append(Group(key, torch.tensor(rows, device=device), len(rows)))
        order = torch.cat([group.rows for group in self._groups])
        self._inverse = torch.argsort(order)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """[M, ...] from one tensor [m, ...] of each group, runs in their order."""
        if self._inverse is None:
            return parts[0]
        return torch.cat(list(parts)).index_select(0, self._inverse)

    def map(self, function: Callable[[Any, Rows], Tensor]) -> Tensor:
        """``function(key, rows)`` of every group, joined."""
        return self.join([function(group.key, group.rows) for group in self._groups])


#: What a draw is for; each purpose has its own stream.
STREAMS = {
    "weights": 0,
    "start": 1,
    "prompts": 2,
    "sampling": 3,
    "noise": 4,
    "fillers": 5,
    "final prompts": 6,
    "final sampling": 7,
    "label prompts": 8,
    "label sampling": 9,
    "label noise": 10,
    "label batches": 11,
    "spread prompts": 12,
    "spread sampling": 13,
    "start prompts": 14,
}


def uniforms(seed: int, stream: str, update: int, shape: Sequence[int]) -> np.ndarray:
    """Uniforms in [0, 1) for one seed, stream and update: float64, of the given shape."""
    key = np.random.SeedSequence([seed, STREAMS[stream], update])
    return np.random.Generator(np.random.Philox(key)).random(tuple(shape))


def run_uniforms(
    seeds: Sequence[int], stream: str, update: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """``[M, *shape]``: the uniforms of each run; runs of equal seed share them."""
    drawn = {seed: uniforms(seed, stream, update, shape) for seed in set(seeds)}
    return torch.from_numpy(np.stack([drawn[seed] for seed in seeds])).to(dtype)


def uploaded(drawn: Tensor, device: torch.device) -> Tensor:
    """Random numbers on a device; to a GPU from pinned memory, so that the CPU need not wait."""
    if device.type != "cuda":
        return drawn.to(device)
    return drawn.pin_memory().to(device, non_blocking=True)
