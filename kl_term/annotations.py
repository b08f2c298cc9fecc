"""The arguments of a call against the annotations of a function (:mod:`kl_term.shapes`).

Shapes, types and devices cost no synchronisation with a device. Values are looked at only where
they must be: a mask of numbers, and NaN where the result could not show it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from kl_term.checks import as_mask
from kl_term.shapes import Axes


@dataclass(frozen=True)
class Values:
    """What types and shapes do not tell of a call's arguments, by their names."""

    masks: tuple[str, ...] = ()  #: of numbers, to become booleans
    zeros_ones: tuple[str, ...] = ()  #: floats that must be 0 or 1
    no_nan: tuple[str, ...] = ()  #: floats that must not be NaN where the mask counts
    cast: tuple[str, ...] = ()  #: floats that become ``widest``
    widest: torch.dtype = torch.float16

    @property
    def are_as_given(self) -> bool:
        return not (self.masks or self.zeros_ones or self.no_nan or self.cast)

    def ready(self, given: dict[str, Any], *, read: bool = True) -> dict[str, Any]:
        """The arguments, masks as booleans and floats in one type."""
        ready = dict(given)
        for name in self.masks:
            mask = given[name]
            ready[name] = as_mask(name, mask, name, mask) if read else mask == 1
        for name in self.zeros_ones if read else ():
            as_mask(name, given[name], name, given[name])
        if self.no_nan:
            _refuse_nan({name: given[name] for name in self.no_nan}, ready.get("mask"))
        for name in self.cast:
            ready[name] = given[name].to(self.widest)
        return ready


class Spec:
    """What one argument may be."""

    def __init__(self, hint: Any) -> None:
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        self.optional = NoneType in options
        self.axes: Axes | None = None
        self.tensor = False
        self.types: list[type] = []
        self.names = ""  #: of the types, for the message
        self.open = False  #: anything may be given, and the function checks it
        self.fields: dict[str, Spec] = {}  #: of a named tuple
        for option in options:
            if get_origin(option) is Annotated:
                self.tensor, self.axes = True, option.__metadata__[0]
            elif option is Tensor:
                self.tensor = True
            elif option in (float, int, str, bool):
                self.types.append(option)
            elif option is not NoneType:
                is_record = hasattr(option, "_fields")
                known = hasattr(option, "num_states") or is_record
                self.types += [option] if known else []
                self.fields |= specs_of(option) if is_record else {}
                self.open = self.open or not known
        self.holds = "numbers" if self.axes is None else self.axes.holds
        self.names = " or ".join([*(["a tensor"] if self.tensor else []), *map(_named, self.types)])


def _named(kind: type) -> str:
    if fields := getattr(kind, "_fields", ()):
        return f"{kind.__name__}({', '.join(fields)})"
    of = {float: "a number", int: "an integer", str: "a name", bool: "True or False"}
    return of.get(kind, kind.__name__)


def specs_of(function: Callable[..., Any]) -> dict[str, Spec]:
    hints = get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    return {name: Spec(hint) for name, hint in hints.items()}


class Checks:
    """The types and shapes of one call's arguments against the annotations."""

    def __init__(self, specs: dict[str, Spec], *, read: bool = True) -> None:
        self.specs = specs
        self.read = read  #: may values be looked at?
        #: Would arguments of the same types and shapes pass again?
        self.remember = True
        self.bound: dict[str, tuple[Any, str]] = {}  #: axis -> its size, and whose

    def passed(self, given: dict[str, Any], *, refuse_nan: bool, widen_half: bool) -> Values:
        """What of them must still be read."""
        tensors: dict[str, Tensor] = {}
        sequences: dict[str, Any] = {}
        records: dict[str, Any] = {}
        for name, value in given.items():
            spec = self.specs.get(name)
            if spec is None or (value is None and spec.optional):
                continue
            if isinstance(value, Tensor):
                self._check_tensor(name, value, spec)
                _check_device(name, value, tensors)
                tensors[name] = value
            elif value is None:
                raise ValueError(f"{name} is None: give it")
            elif not spec.open:
                _check_plain(name, value, spec)
                if hasattr(value, "num_states"):
                    sequences[name] = value
                elif hasattr(value, "_fields"):
                    records[name] = value
        for name, value in sequences.items():  # last: tables say how many tokens there are
            self._bind_sequences(name, value)
        for name, value in records.items():
            self._check_record(name, value, tensors, refuse_nan=refuse_nan)
        holding: dict[str, list[str]] = {"mask": [], "zeros and ones": []}
        floats = []
        for name, tensor in tensors.items():
            holds = self.specs[name].holds
            if holds in holding and not (holds == "mask" and tensor.dtype == torch.bool):
                holding[holds].append(name)
            if tensor.is_floating_point() and holds != "mask":
                floats.append(name)
        dtypes = [tensors[name].dtype for name in floats]
        widest = torch.float32 if widen_half else next(iter(dtypes), torch.float32)
        for dtype in dtypes:
            widest = torch.promote_types(widest, dtype)
        return Values(
            masks=tuple(holding["mask"]),
            zeros_ones=tuple(holding["zeros and ones"]),
            no_nan=tuple(floats) if refuse_nan else (),
            cast=tuple(name for name in floats if tensors[name].dtype != widest),
            widest=widest,
        )

    def _check_tensor(self, name: str, value: Tensor, spec: Spec) -> None:
        if not (spec.tensor or spec.open):
            raise ValueError(f"{name} must be {spec.names}, got a tensor of {value.dtype}")
        _check_holds(name, value, spec.holds)
        if spec.axes is not None and spec.axes.names != "*":
            self._bind(name, value, spec.axes)

    def _check_record(
        self, name: str, record: Any, others: dict[str, Tensor], *, refuse_nan: bool
    ) -> None:
        """The fields of a named tuple, each against its annotation."""
        self.remember = False
        for field, spec in self.specs[name].fields.items():
            label, value = f"{name}.{field}", getattr(record, field)
            if isinstance(value, Tensor):
                self._check_tensor(label, value, spec)
                _check_device(label, value, others)
                if refuse_nan:
                    _refuse_nan({label: value}, None)
            elif not (spec.open or (value is None and spec.optional)):
                _check_plain(label, value, spec)

    def _bind(self, name: str, value: Tensor, axes: Axes) -> None:
        """One size a name, over all arguments of a call."""
        shape, names = tuple(value.shape), axes.names.split()
        leading = names[0] == "..."
        own = names[leading:]
        if len(shape) < len(own) or (not leading and len(shape) != len(own)):
            raise ValueError(
                f"{name} has shape {shape}: it must be [{axes.names.replace(' ', ', ')}]"
            )
        split = len(shape) - len(own)
        sizes: list[tuple[str, Any]] = list(zip(own, shape[split:], strict=True))
        if leading:
            sizes.append(("...", shape[:split]))
        for axis, size in sizes:
            before, owner = self.bound.setdefault(axis, (size, name))
            if before != size:
                raise ValueError(
                    f"{name} has shape {shape}, in which {axis} is {size}, but in {owner} it is "
                    f"{before}: they must be equal (expand explicitly if you mean to broadcast)"
                )

    def _bind_sequences(self, name: str, sequences: Any) -> None:
        self.remember = False
        self._bind(name, sequences.mask, Axes("N T", "mask"))
        if not self.read:
            return
        rows, owner = self.bound.setdefault("S", (sequences.num_states, name))
        largest = int(sequences.tokens.max()) if sequences.tokens.numel() else 0
        vocab, _ = self.bound.setdefault("V", (largest + 1, name))
        if rows != sequences.num_states or vocab <= largest:
            raise ValueError(
                f"{owner} must be a table [{sequences.num_states}, vocab], one row a prefix of "
                f"{name}, over its tokens 0 to {largest}; it is [{rows}, {vocab}]"
            )


def _check_device(name: str, value: Tensor, others: dict[str, Tensor]) -> None:
    if value.is_meta:
        raise ValueError(f"{name} is on the meta device, which holds no values")
    for other, tensor in others.items():
        if tensor.device != value.device:
            raise ValueError(
                f"{name} is on {value.device} but {other} is on {tensor.device}: move one"
            )


def _check_plain(name: str, value: Any, spec: Spec) -> None:
    """A number, a name, or sequences."""
    kinds = spec.types
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if (real and float in kinds) or (real and isinstance(value, int) and int in kinds):
        if value != value:
            raise ValueError(f"{name} is NaN: give a number")
        if int not in kinds and abs(value) > sys.float_info.max and isinstance(value, int):
            raise ValueError(f"{name} is an integer beyond the range of floats")
        return
    if not any(isinstance(value, kind) for kind in kinds if kind not in (float, int)):
        raise ValueError(f"{name} must be {spec.names}, got {type(value).__name__} {value!r:.60}")


def _check_holds(name: str, value: Tensor, holds: str) -> None:
    if value.is_complex():
        raise ValueError(f"{name} must be real, got {value.dtype}")
    integer = not value.is_floating_point() and value.dtype != torch.bool
    if holds in ("floats", "zeros and ones") and not value.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor, got {value.dtype}")
    if holds == "integers" and not integer:
        raise ValueError(f"{name} must be a tensor of integers, got {value.dtype}")
    if holds == "booleans" and value.dtype != torch.bool:
        raise ValueError(f"{name} must be a boolean tensor, got {value.dtype}")


def _refuse_nan(floats: dict[str, Tensor], mask: Tensor | None) -> None:
    for name, value in floats.items():
        found = value.isnan()
        if mask is not None and mask.shape == value.shape:
            found = found & mask
        if found.any():
            raise ValueError(f"{name} holds NaN, which the result could not show")
