"""Argument checks: one clear ``ValueError`` that names the argument and says what to do.

:func:`checked` is the guard of the public functions: it reads their annotations
(:mod:`kl_term.shapes`). Shapes, types and devices cost no synchronisation with a device. Values
are looked at only where they must be: a mask of numbers, and NaN where the result could not show
it. Everywhere else a non-finite number stays visible in the result. What is compiled is checked
while it is traced, and no value of it is looked at.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints, overload

import torch
from torch import Tensor

from kl_term.shapes import Axes

F = TypeVar("F", bound=Callable[..., Any])

_WIDE = (torch.float32, torch.float64)


class _Trust(threading.local):
    """Does the guard let everything pass in this thread? What torch.compile traces can read it."""

    def __init__(self) -> None:
        self.on = False


_TRUST = _Trust()


@contextmanager
def trusted() -> Iterator[None]:
    """The guard lets everything pass inside: for a trainer that made the tensors itself."""
    before = _TRUST.on
    _TRUST.on = True
    try:
        yield
    finally:
        _TRUST.on = before


@overload
def checked(function: F) -> F: ...
@overload
def checked(*, nan: str = ..., half: str = ...) -> Callable[[F], F]: ...
def checked(function: Any = None, *, nan: str = "shown", half: str = "widened") -> Any:
    """Refuse arguments that contradict the annotations of a function.

    A tensor must hold what its annotation says, on the device of the others, with axes of one size
    a name; it must not be complex. Floats of several types are computed in the widest, those of
    half precision in float32, and a mask arrives as booleans. A float must be a number and not NaN,
    an integer an integer. What the function calls in turn is trusted: arguments are checked once,
    where they come in. What torch refuses all the same, such as shapes that do not broadcast where
    a function says that they do, is refused with the names and shapes of the arguments. Autocast
    is off inside: results are those of the given types.

    In what ``torch.compile`` traces, types, shapes and devices are checked as everywhere, and
    floats widened; values are not read. A mask of numbers counts where it is 1, and ``refused``
    refuses no NaN. ``fullgraph=True`` ends in torch's own error, which quotes the refusal.

    Args:
        nan: ``shown`` where NaN in a tensor reaches the result; ``refused`` where it could not,
            as in a result of booleans or indices. Positions that ``mask`` leaves out are not read.
        half: ``widened`` to float32; ``kept`` by what only chooses, or widens a part at a time.

    Raises (when called):
        ValueError: naming the argument.
    """
    if function is None:
        return lambda found: _guard(found, nan, half)
    return _guard(function, nan, half)


def _guard(function: Callable[..., Any], nan: str, half: str) -> Callable[..., Any]:
    names = list(inspect.signature(function).parameters)
    compiling = torch.compiler.is_compiling
    trust = _TRUST
    #: Types and shapes that have passed -> what must still be read at every such call, if anything.
    known: dict[tuple[Any, ...], _Values | None] = {}
    specs = _specs(function)

    @wraps(function)
    def guard(*args: Any, **kwargs: Any) -> Any:
        if trust.on:
            return function(*args, **kwargs)
        if compiling():  # in this very frame: one that torch cannot trace runs as it stands
            trust.on = True
            try:
                given = dict(zip(names, args, strict=False)) | kwargs
                checks = _Checks(specs, read=False)
                traced = checks.passed(given, refuse_nan=False, widen_half=half == "widened")
                ready = traced.ready(given, read=False)
                args = (*(ready[name] for name in names[: len(args)]), *args[len(names) :])
                kwargs = {name: ready[name] for name in kwargs}
                with _without_autocast((*args, *kwargs.values())):
                    return function(*args, **kwargs)
            finally:
                trust.on = False
        device = None
        key: list[Any] = []
        for value in args:
            if isinstance(value, Tensor):
                device = value.device
                key += (value.shape, value.dtype, device)
            else:
                key.append(_NAN if isinstance(value, float) and value != value else type(value))
        for name in kwargs:
            value = kwargs[name]
            if isinstance(value, Tensor):
                device = value.device
                key += (name, value.shape, value.dtype, device)
            else:
                key += (name, _NAN if isinstance(value, float) and value != value else type(value))
        passed = tuple(key)
        values = known.get(passed, _UNKNOWN)
        trust.on = True
        try:
            if values is not None and len(args) <= len(names):  # else it refuses them itself
                given = dict(zip(names, args, strict=False)) | kwargs
                if values is _UNKNOWN:
                    checks = _Checks(specs)
                    values = checks.passed(
                        given, refuse_nan=nan == "refused", widen_half=half == "widened"
                    )
                    if checks.remember:
                        if len(known) >= _REMEMBERED:
                            known.clear()
                        known[passed] = None if values.are_as_given else values
                ready = values.ready(given)
                args = tuple(ready[name] for name in names[: len(args)])
                kwargs = {name: ready[name] for name in kwargs}
            if device is not None and _is_autocast(device.type):
                with torch.autocast(device.type, enabled=False):
                    return function(*args, **kwargs)
            return function(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError) as error:
            given = dict(zip(names, args, strict=False)) | kwargs
            raise ValueError(_refused_by_torch(function.__name__, given, error)) from error
        finally:
            trust.on = False

    return guard


def _without_autocast(values: tuple[Any, ...]) -> AbstractContextManager[None]:
    for value in values:
        if isinstance(value, Tensor) and _is_autocast(value.device.type):
            return torch.autocast(value.device.type, enabled=False)
    return nullcontext()


def _refused_by_torch(name: str, given: dict[str, Any], error: Exception) -> str:
    """Its first line, after what each argument was."""
    said = []
    for argument, value in given.items():
        if isinstance(value, Tensor):
            layout = "" if value.layout == torch.strided else f" {value.layout}"
            said.append(f"{argument} {list(value.shape)}{layout}")
        elif isinstance(value, (int, float, str)):
            said.append(f"{argument}={value!r:.40}")
        elif argument != "self" and value is not None:
            said.append(argument)
    first, *_ = str(error).splitlines() or [type(error).__name__]
    return f"{name} cannot take {', '.join(said)}: {first}"


@dataclass(frozen=True)
class _Values:
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


#: Nothing is known yet; and how many sets of types and shapes a function remembers.
_UNKNOWN = _Values()
_REMEMBERED = 256
#: Stands for a number that is NaN where a type stands for all others.
_NAN = "NaN"
_is_autocast = torch.is_autocast_enabled


class _Spec:
    """What one argument may be."""

    def __init__(self, hint: Any) -> None:
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        self.optional = NoneType in options
        self.axes: Axes | None = None
        self.tensor = False
        self.types: list[type] = []
        self.names = ""  #: of the types, for the message
        self.open = False  #: anything may be given, and the function checks it
        self.fields: dict[str, _Spec] = {}  #: of a named tuple
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
                self.fields |= _specs(option) if is_record else {}
                self.open = self.open or not known
        self.holds = "numbers" if self.axes is None else self.axes.holds
        self.names = " or ".join([*(["a tensor"] if self.tensor else []), *map(_named, self.types)])


def _named(kind: type) -> str:
    if fields := getattr(kind, "_fields", ()):
        return f"{kind.__name__}({', '.join(fields)})"
    of = {float: "a number", int: "an integer", str: "a name", bool: "True or False"}
    return of.get(kind, kind.__name__)


def _specs(function: Callable[..., Any]) -> dict[str, _Spec]:
    hints = get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    return {name: _Spec(hint) for name, hint in hints.items()}


class _Checks:
    """The types and shapes of one call's arguments against the annotations."""

    def __init__(self, specs: dict[str, _Spec], *, read: bool = True) -> None:
        self.specs = specs
        self.read = read  #: may values be looked at?
        #: Would arguments of the same types and shapes pass again?
        self.remember = True
        self.bound: dict[str, tuple[Any, str]] = {}  #: axis -> its size, and whose

    def passed(self, given: dict[str, Any], *, refuse_nan: bool, widen_half: bool) -> _Values:
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
        return _Values(
            masks=tuple(holding["mask"]),
            zeros_ones=tuple(holding["zeros and ones"]),
            no_nan=tuple(floats) if refuse_nan else (),
            cast=tuple(name for name in floats if tensors[name].dtype != widest),
            widest=widest,
        )

    def _check_tensor(self, name: str, value: Tensor, spec: _Spec) -> None:
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


def _check_plain(name: str, value: Any, spec: _Spec) -> None:
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


def per_token_advantages(advantages: Tensor, like_name: str, like: Tensor) -> Tensor:
    """Advantages [...] (one a row) or [..., T] as [..., T], in at least float32."""
    check_float("advantages", advantages)
    advantages = at_least_float32(advantages)
    if advantages.shape == like.shape:
        return advantages
    if like.ndim > 0 and advantages.shape == like.shape[:-1]:
        return advantages.unsqueeze(-1).expand_as(like)
    packed = advantages.ndim == 1 and len(advantages) > like.shape[:-1].numel()
    raise ValueError(
        f"advantages has shape {tuple(advantages.shape)} but {like_name} has {tuple(like.shape)}: "
        f"give one a row, {tuple(like.shape[:-1])}, or one a token, {tuple(like.shape)}"
        + ("; where a row holds several sequences, give their sequence_ids" if packed else "")
    )


def check_float(name: str, tensor: Tensor) -> None:
    """Refuse anything but a floating-point tensor."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor, got {tensor.dtype}")


def check_same_shape(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse two tensors whose shapes differ: nothing broadcasts silently here."""
    if tensor.shape != other.shape:
        raise ValueError(
            f"{other_name} has shape {tuple(other.shape)} but {name} has {tuple(tensor.shape)}: "
            "they must be equal (expand explicitly if you mean to broadcast)"
        )


def check_probabilities(name: str, tensor: Tensor) -> None:
    """Refuse anything but floats in [0, 1]."""
    check_float(name, tensor)
    if not bool(((tensor >= 0) & (tensor <= 1)).all()):
        raise ValueError(f"{name} must hold probabilities, in [0, 1]")


def check_comes_first(name: str, counted: Tensor) -> None:
    """Refuse a mask [..., T] that counts a position after one that it leaves out."""
    if bool((counted[..., 1:] & ~counted[..., :-1]).any()):
        raise ValueError(f"{name} counts a position after a masked one: counted ones come first")


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half-precision inputs are computed (and returned) in float32; float64 stays float64."""
    if tensor.dtype in _WIDE:
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def default_float() -> torch.dtype:
    """Of results whose arguments hold no floats: torch's default, and at least float32."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def pair_of_floats(
    name: str, tensor: Tensor, other_name: str, other: Tensor
) -> tuple[Tensor, Tensor]:
    """Two floating-point tensors of equal shape, in a common dtype of at least float32."""
    alike = isinstance(tensor, Tensor) and isinstance(other, Tensor) and tensor.dtype in _WIDE
    if alike and tensor.dtype == other.dtype and tensor.shape == other.shape:
        return tensor, other
    check_float(name, tensor)
    check_float(other_name, other)
    check_same_shape(name, tensor, other_name, other)
    dtype = torch.promote_types(torch.promote_types(tensor.dtype, other.dtype), torch.float32)
    return tensor.to(dtype), other.to(dtype)


def as_mask(name: str, mask: Tensor, like_name: str, like: Tensor) -> Tensor:
    """A boolean mask (True = counted) of the shape of ``like``; tensors of 0 and 1 are accepted."""
    if not isinstance(mask, Tensor):
        raise ValueError(f"{name} must be a torch tensor, got {type(mask).__name__}")
    check_same_shape(like_name, like, name, mask)
    if mask.dtype == torch.bool:
        return mask
    counted = mask == 1
    other = ~(counted | (mask == 0))
    if other.any():
        raise ValueError(f"{name} must hold 0 or 1, got {mask[other][0].item()!r}: True = counted")
    return counted
