"""The guard of the public functions: arguments that contradict their annotations are refused.

Everywhere a non-finite number stays visible in the result. What is compiled is checked while it is
traced, and no value of it is looked at.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from kl_term.annotations import Checks, Values, specs_of

F = TypeVar("F", bound=Callable[..., Any])

#: Nothing is known yet; and how many sets of types and shapes a function remembers.
_UNKNOWN = Values()
_REMEMBERED = 256
#: Stands for a number that is NaN where a type stands for all others.
_NAN = "NaN"
_is_autocast = torch.is_autocast_enabled


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
    known: dict[tuple[Any, ...], Values | None] = {}
    specs = specs_of(function)

    @wraps(function)
    def guard(*args: Any, **kwargs: Any) -> Any:
        if trust.on:
            return function(*args, **kwargs)
        if compiling():  # in this very frame: one that torch cannot trace runs as it stands
            trust.on = True
            try:
                given = dict(zip(names, args, strict=False)) | kwargs
                checks = Checks(specs, read=False)
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
                    checks = Checks(specs)
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
