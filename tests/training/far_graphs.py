"""What a CUDA graph does, on the far device: operations are recorded and repeated where they were.

As with CUDA, a recording sees nothing of the program that made it: numbers of the CPU stay as they
were, nothing may be read from the device or sent to it, and until it is repeated its results hold
nothing, here NaN and the smallest integers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.training import far_device
from tests.training.far_device import FarTensor


class Call(NamedTuple):
    """One operation of a recording, with the CPU's tensors behind the far ones."""

    operation: Any
    args: Any
    kwargs: dict[str, Any]
    made: list[tuple[int, torch.Tensor]]  #: results with memory of their own, by their place


class FarRecorder:
    """Stands in for :class:`analysis.training.graphs.CudaRecorder`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.shared: list[Call] = []  #: of all passing recordings

    def record(
        self, function: Callable[[], Any], *, passing: bool
    ) -> tuple[Any, Callable[[], None]]:
        calls = self.calls = []
        far_device.WATCHERS.append(refuse_traffic)
        far_device.AFTER.append(self._note)
        try:
            outputs = function()
        finally:
            far_device.AFTER.remove(self._note)
            far_device.WATCHERS.remove(refuse_traffic)
        empty(calls)
        if not passing:
            return outputs, lambda: repeat(calls)
        self.shared += calls

        def repeat_over_shared() -> None:
            empty(self.shared)
            repeat(calls)

        return outputs, repeat_over_shared

    def address(self, tensor: torch.Tensor) -> Hashable:
        return tensor.near.data_ptr()

    def _note(self, operation: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        near_args, near_kwargs = tree_map(_near, (args, kwargs))
        held = {memory(x) for x in tree_leaves((near_args, near_kwargs)) if _is_tensor(x)}
        results = [_near(x) for x in tree_leaves(result)]
        made = [(i, x) for i, x in enumerate(results) if _is_tensor(x) and memory(x) not in held]
        kwargs = {name: _device(value) for name, value in near_kwargs.items()}
        self.calls.append(Call(operation, near_args, kwargs, made))


def repeat(calls: list[Call]) -> None:
    """The operations again; only results with memory of their own need be written."""
    with _disable_current_modes():
        for call in calls:
            results = tree_leaves(call.operation(*call.args, **call.kwargs))
            for place, tensor in call.made:
                tensor.copy_(results[place])


def empty(calls: list[Call]) -> None:
    """What they made holds nothing from now on."""
    with _disable_current_modes():
        for call in calls:
            for _, tensor in call.made:
                _empty(tensor)


def refuse_traffic(operation: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Between the device and the CPU, as CUDA refuses it while it records."""
    tensors = [x for x in tree_leaves((args, kwargs)) if _is_tensor(x)]
    copies = operation in far_device.COPIES  # of numbers too
    near = [x for x in tensors if not isinstance(x, FarTensor) and (copies or x.dim() > 0)]
    if near or far_device.reads(operation, args, kwargs):
        raise RuntimeError(f"{operation}: far device and CPU meet inside a recording")


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _empty(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)


def _device(value: Any) -> Any:
    """A recording makes its tensors where the far device keeps its numbers."""
    return torch.device("cpu") if isinstance(value, (str, torch.device)) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _near(value: Any) -> Any:
    return value.near if isinstance(value, FarTensor) else value
