"""The numbers that a function is not given: defaults, and what its configurations hold."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace

from kl_term.audit.arguments import numbers_of
from kl_term.audit.calling import Foreign
from kl_term.audit.holding import changed, numbers_in, with_coefficient, with_held

#: Before the path to what the object itself holds.
_SELF = "self"
#: Before the name of what is given when the loss is made.
MADE = "made"


def numbers_beside(foreign: Foreign, *, integers: bool = False) -> dict[str, float]:
    """Of its signature by name, and of its configurations by path."""
    found = dict(foreign.untold(integers=integers))
    for name, value in foreign.plan.fixed.items():
        if not name.startswith("*"):
            found |= {".".join((name, *path)): x for path, x in numbers_in(value)}
    return found


def numbers_held(foreign: Foreign) -> dict[str, float]:
    """Of the object that the function is, or that it is a method of, by path."""
    function = getattr(foreign.function, "of", foreign.function)
    if inspect.isfunction(function) or isinstance(function, functools.partial):
        return {}
    held = getattr(function, "__self__", function)
    return {f"{_SELF}.{'.'.join(path)}": x for path, x in numbers_in(held)}


def numbers_made(foreign: Foreign) -> dict[str, float]:
    """Defaults of what makes the loss, by name."""
    if foreign.factory is None:
        return {}
    maker = functools.partial(foreign.function, **{foreign.factory: None})
    try:
        numbers = numbers_of(maker, integers=True)
    except (TypeError, ValueError):  # it has no signature
        return {}
    return {f"{MADE}.{name}": default for name, default in numbers.items()}


def fixed_with(foreign: Foreign, values: dict[str, float]) -> dict[str, object]:
    """What it is given as it is, with other numbers."""
    fixed = {n: v for n, v in foreign.plan.fixed.items() if not n.startswith("*")}
    for path, value in values.items():
        name, _, inner = path.partition(".")
        fixed[name] = changed(fixed[name], inner, value) if inner else value
    return fixed


def with_number(foreign: Foreign, path: str, value: float) -> Foreign:
    """The function with another value of an argument, or of what lies in one."""
    held, _, inner = path.partition(".")
    if held == _SELF:
        function = getattr(foreign.function, "of", foreign.function)
        other = with_held(function, inner, value)
        if function is not foreign.function and foreign.factory is not None:
            other = with_coefficient(other, foreign.factory)
        return replace(foreign, function=other, notes=set())
    if held == MADE:
        other = functools.partial(foreign.function, **{inner: value})
        return replace(foreign, function=other, notes=set())
    fixed = foreign.plan.fixed | fixed_with(foreign, {path: value})
    return replace(foreign, plan=foreign.plan._replace(fixed=fixed), notes=set())
