"""An object that holds its coefficient: made once more for each coefficient, the object kept."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from kl_term.audit.arguments import name_of
from kl_term.audit.spellings import role_of


def coefficient_of(function: Callable[..., Any], beta_name: str | None) -> str | None:
    """The number of an object, or of a bound method's object, that is named as a coefficient is.

    None for a function, for what takes the coefficient as an argument, and where two are named so.
    """
    if inspect.isclass(function) or inspect.isfunction(function):
        return None
    try:
        held = vars(getattr(function, "__self__", function))
        taken = inspect.signature(getattr(function, "forward", function)).parameters
    except (TypeError, ValueError):
        return None
    if any(role_of(name) == "beta" for name in taken) or beta_name in taken:
        return None
    named = [
        name
        for name, value in held.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        and (name == beta_name if beta_name else role_of(name) == "beta")
    ]  # fmt: skip
    return named[0] if len(named) == 1 else None


def with_coefficient(function: Callable[..., Any], name: str) -> Callable[..., Callable[..., Any]]:
    """What makes the same callable of a copy that holds another coefficient."""

    def made(**given: Any) -> Callable[..., Any]:
        changed = copy.copy(getattr(function, "__self__", function))
        setattr(changed, name, given[name])
        method = getattr(function, "__name__", "") if inspect.ismethod(function) else ""
        return getattr(changed, method) if method else changed

    made.__name__ = name_of(function)
    return made
