"""Members of a population grouped by what they compute.

Every group is one batched call on its own rows. Where all members share a key there is one group,
its rows are a slice, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)
Rows = slice | Tensor


class Group(NamedTuple):
    """Members that share a key."""

    key: Any
    rows: Rows  #: their places in the population: index a tensor [M, ...] with it
    size: int


class Groups(Generic[Key]):
    """The groups of a population, in the order of their first members.

    Args:
        keys: one a member.
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
        """[M, ...] from one tensor [m, ...] of each group, members in their order."""
        if self._inverse is None:
            return parts[0]
        return torch.cat(list(parts)).index_select(0, self._inverse)

    def map(self, function: Callable[[Any, Rows], Tensor]) -> Tensor:
        """``function(key, rows)`` of every group, joined."""
        return self.join([function(group.key, group.rows) for group in self._groups])
