"""An object that holds its coefficient, itself or in a configuration, however deep.

A loss that is such an object, or a method of one, is made once more for each coefficient; of a
configuration that is an argument a changed copy is given. The caller's object is left as it was.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_type_hints

import torch

from kl_term.audit.arguments import name_of
from kl_term.audit.spellings import role_inside, role_of

#: How deep configurations lie in configurations.
_DEPTH = 4


def coefficient_of(function: Callable[..., Any], beta_name: str | None) -> str | None:
    """The path to the number of an object, or of a bound method's object, that is the coefficient.

    None for a function, for what takes the coefficient as an argument, and where two are named so.
    """
    if inspect.isclass(function) or inspect.isfunction(function):
        return None
    if isinstance(function, functools.partial):
        return None
    try:
        held = getattr(function, "__self__", function)
        taken = inspect.signature(getattr(function, "forward", function)).parameters
    except (TypeError, ValueError):
        return None
    if any(role_of(name) == "beta" for name in taken) or beta_name in taken:
        return None
    return path_in(held, beta_name)


def path_in(held: Any, beta_name: str | None = None) -> str | None:
    """The path to the one number that is named as a coefficient is, the shallowest first."""
    found = sorted((p for p, _ in numbers_in(held) if _is_named(p, beta_name)), key=len)
    shallow = [path for path in found if len(path) == len(found[0])]
    return ".".join(shallow[0]) if len(shallow) == 1 else None


def numbers_in(
    held: Any, above: tuple[str, ...] = (), depth: int = _DEPTH
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every number that an object holds, however deep, and the path to it."""
    for name, value in _entries(held).items():
        path = (*above, name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield path, value
        elif depth > 1 and not isinstance(value, (torch.Tensor, torch.nn.Module, type)):
            yield from numbers_in(value, path, depth - 1)


def _is_named(path: tuple[str, ...], beta_name: str | None) -> bool:
    """As was said, or as a coefficient is."""
    if beta_name:
        return beta_name in (path[-1], ".".join(path))
    return "beta" in (role_of(path[-1]), role_inside(*path))


def _entries(held: Any) -> dict[str, Any]:
    if isinstance(held, Mapping):
        return {name: value for name, value in held.items() if isinstance(name, str)}
    if hasattr(held, "_asdict"):
        return held._asdict()
    return dict(getattr(held, "__dict__", {}))


def changed(held: Any, path: str, value: Any) -> Any:
    """A copy with another value at a path."""
    name, _, inner = path.partition(".")
    if inner:
        of = held[name] if isinstance(held, Mapping) else getattr(held, name)
        value = changed(of, inner, value)
    if hasattr(held, "_replace") and hasattr(held, "_asdict"):
        return held._replace(**{name: value})
    copied = copy.copy(held)
    if isinstance(copied, Mapping):
        copied[name] = value  # type: ignore[index]
    elif dataclasses.is_dataclass(copied):
        object.__setattr__(copied, name, value)  # frozen or not
    else:
        setattr(copied, name, value)
    return copied


def with_coefficient(function: Callable[..., Any], path: str) -> Callable[..., Callable[..., Any]]:
    """What makes the same callable of a copy that holds another coefficient."""

    def made(**given: Any) -> Callable[..., Any]:
        return with_held(function, path, given[path])

    made.__name__ = name_of(function)
    made.of = function  # type: ignore[attr-defined]
    return made


def with_held(function: Callable[..., Any], path: str, value: Any) -> Callable[..., Any]:
    """The same callable, or method, of a copy that holds another value."""
    copied = changed(getattr(function, "__self__", function), path, value)
    method = getattr(function, "__name__", "") if inspect.ismethod(function) else ""
    return getattr(copied, method) if method else copied


def configurations(
    function: Callable[..., Any], given: Mapping[str, Any], beta_name: str | None
) -> tuple[dict[str, Any], str | None]:
    """What is given, with the configurations that a signature says how to make, and the path to
    the coefficient in one of these."""
    found = dict(given)
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters
    except (TypeError, ValueError):
        return found, beta_name
    for name, parameter in parameters.items():
        made = None if name in found else _made(function, parameter)
        if made is not None and (role_of(name) == "config" or path_in(made, beta_name)):
            found[name] = made
    if "." in (beta_name or "") or beta_name in parameters:
        return found, beta_name
    if any(role_of(name) == "beta" for name in parameters):
        return found, beta_name
    inside = {n: path_in(v, beta_name) for n, v in found.items() if n in parameters}
    paths = [f"{name}.{path}" for name, path in inside.items() if path is not None]
    return found, paths[0] if len(paths) == 1 else beta_name


def _made(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The default of a parameter that is a configuration, or one made of its annotation."""
    empty = parameter.default is parameter.empty
    if not empty and parameter.default is not None:
        return parameter.default if _entries(parameter.default) else None
    try:
        kind = get_type_hints(getattr(function, "forward", function)).get(parameter.name)
    except Exception:
        return None
    if not inspect.isclass(kind) or not _is_configuration(kind):
        return None
    try:
        return kind()
    except Exception:
        return None  # it has fields without a default


def _is_configuration(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields")
