"""What a CUDA graph does, on the CPU: operations are recorded and repeated where they were.

As with CUDA, a recording sees nothing of the program that made it, so numbers of the program stay
as they were, and until it is repeated its results hold nothing: here NaN and the smallest integers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Call(NamedTuple):
    """One operation of a recording."""

    operation: Any
    args: Any
    kwargs: dict[str, Any]
    made: list[tuple[int, torch.Tensor]]  #: results with memory of their own, by their place

    def repeat(self) -> None:
        """Only results with memory of their own need be written."""
        results = tree_leaves(self.operation(*self.args, **self.kwargs))
        for place, tensor in self.made:
            tensor.copy_(results[place])

    def empty(self) -> None:
        """What it made holds nothing from now on."""
        for _, tensor in self.made:
            nothing = torch.nan if tensor.is_floating_point() else smallest(tensor.dtype)
            tensor.fill_(nothing)


class Taping(TorchDispatchMode):
    """Notes every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        held = {memory(leaf) for leaf in tree_leaves((args, kwargs)) if is_tensor(leaf)}
        leaves = enumerate(tree_leaves(result))
        made = [(n, leaf) for n, leaf in leaves if is_tensor(leaf) and memory(leaf) not in held]
        self.calls.append(Call(operation, args, kwargs, made))
        return result


class Tape:
    """Stands in for :class:`analysis.training.graphs.CudaRecorder`."""

    def __init__(self) -> None:
        self.shared: list[Call] = []  #: of all passing recordings

    def record(
        self, function: Callable[[], Any], *, passing: bool
    ) -> tuple[Any, Callable[[], None]]:
        with Taping() as taping:
            outputs = function()
        calls = taping.calls
        self.shared += calls if passing else []

        @torch.no_grad()
        def replay() -> None:
            for call in self.shared if passing else calls:
                call.empty()
            for call in calls:
                call.repeat()

        return outputs, replay

    def address(self, tensor: torch.Tensor) -> Hashable:
        return tensor.data_ptr()


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def smallest(dtype: torch.dtype) -> int:
    return False if dtype == torch.bool else torch.iinfo(dtype).min
