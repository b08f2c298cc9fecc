"""A device that is not the CPU and needs no hardware: ``torch.device("far")``.

Its tensors keep their numbers in a tensor of the CPU and compute with the CPU's kernels, but an
operation that mixes them with tensors of the CPU is refused as CUDA refuses it, and only an
explicit copy goes from one to the other. So code that runs here has no tensor on the wrong device,
and its results must be those of the CPU. It proves nothing about CUDA's own kernels.

PyTorch lets a process have one such backend: install it in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

NAME = "far"
KEY = "PrivateUse1"
LIBRARY = torch.library.Library("aten", "IMPL")
aten = torch.ops.aten

#: Called with every operation of the device, its arguments and options.
WATCHERS: list[Callable[[Any, Any, dict[str, Any]], None]] = []
#: The same, and with its result.
AFTER: list[Callable[[Any, Any, dict[str, Any], Any], None]] = []

#: What goes from one device to another.
COPIES = {aten._to_copy.default, aten.copy_.default}
#: Where CUDA also takes indices on the CPU: name -> place of the indices among the arguments.
INDEXING = {aten.index.Tensor: 1, aten.index_put_.default: 1, aten._index_put_impl_.default: 1}


class FarTensor(torch.Tensor):
    """A tensor of the device, around the CPU's tensor ``near``."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> FarTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            near.size(),
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=torch.device(NAME, 0),
        )
        made.near = near
        return made

    def tolist(self) -> Any:
        """CUDA copies too; for subclasses of tensors torch itself does not."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("a far tensor has no numpy array: copy it to the CPU first")

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


class Creation(TorchDispatchMode):
    """Sends operations here that have no far tensor among their arguments: they may make one."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


def compute(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the CPU's numbers; its results are far if it is."""
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    for watch in WATCHERS:
        watch(operation, args, kwargs)
    wanted = kwargs.get("device")
    there = any(isinstance(tensor, FarTensor) for tensor in tensors)
    if wanted is not None:
        there = torch.device(wanted).type == NAME
        kwargs = kwargs | {"device": torch.device("cpu") if there else wanted}
    elif operation in COPIES:
        there = isinstance(args[0], FarTensor)
    if operation not in COPIES:
        _refuse_mixed(operation, args, tensors)
    near_args, near_kwargs = tree_map(_near, (args, kwargs))
    result = operation(*near_args, **near_kwargs)
    if there:
        result = tree_map(_far, result)
        result = return_and_correct_aliasing(operation, args, kwargs, result)
    for watch in AFTER:
        watch(operation, args, kwargs, result)
    return result


def reads(operation: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Does CUDA wait here until the device is done, because the CPU must know some numbers?"""
    wanted = kwargs.get("device")
    if operation is aten._to_copy.default and wanted is not None:
        return torch.device(wanted).type == "cpu"
    if operation in INDEXING:  # a mask says only when it is read how much it chooses
        chosen = [index for index in args[INDEXING[operation]] if index is not None]
        return any(index.dtype == torch.bool for index in chosen)
    return operation in (aten._local_scalar_dense.default, aten.nonzero.default)


def _refuse_mixed(operation: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    """As CUDA does: all tensors on one device, but for numbers and, in indexing, the indices."""
    if not any(isinstance(tensor, FarTensor) for tensor in tensors):
        return
    free: set[int] = set()
    if operation in INDEXING and isinstance(args[0], FarTensor):
        free = {id(tensor) for tensor in args[INDEXING[operation]] if tensor is not None}
    for tensor in tensors:
        if not isinstance(tensor, FarTensor) and tensor.dim() > 0 and id(tensor) not in free:
            raise RuntimeError(
                f"{operation}: a tensor of the CPU, {tuple(tensor.shape)}, among far"
            )


def _near(value: Any) -> Any:
    return value.near if isinstance(value, FarTensor) else value


def _far(value: Any) -> Any:
    return FarTensor(value) if isinstance(value, torch.Tensor) else value


def _called(operation: Any, *args: Any, **kwargs: Any) -> Any:
    return compute(operation, args, kwargs)


def install() -> Creation:
    """Register the device; enter what is returned to make tensors on it."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME)
    # Creation inside torch itself, as in ``torch.tensor(..., device="far")``, asks no mode.
    for operation in (aten.empty_strided.default, aten.empty.memory_format, aten.copy_.default):
        LIBRARY.impl(operation, partial(_called, operation), KEY)
    return Creation()
