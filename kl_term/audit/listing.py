"""What annotations say of lists: tensors that come one an answer, and lengths that are numbers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, get_type_hints

_LIST = r"(?:list|List|Sequence|Iterable|tuple|Tuple)\[.*"
_OF_TENSORS = re.compile(_LIST + "Tensor")
_OF_NUMBERS = re.compile(_LIST + r"\bint\b")
_OF_BATCHES = re.compile(
    r"(?:list|List|Sequence)\[(?:typing\.)?"
    r"(?:(?:dict|Dict|Mapping)\b|(?!.*(?:Tensor|int|float|str|bool)\b)\w)"
)


def takes_lists(function: Callable[..., Any]) -> bool:
    """Whether an argument is annotated as a list of tensors."""
    return _annotated(function, _OF_TENSORS)


def takes_numbers(function: Callable[..., Any]) -> bool:
    """Whether an argument is annotated as a list of whole numbers."""
    return _annotated(function, _OF_NUMBERS)


def takes_rows(function: Callable[..., Any]) -> bool:
    """Whether an argument is annotated as a list of what holds tensors, such as a dictionary."""
    return _annotated(function, _OF_BATCHES)


def arrays_of(function: Callable[..., Any]) -> set[str]:
    """The arguments that are annotated as arrays of numpy, such as the ids of groups."""
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters
    except (TypeError, ValueError):
        return set()
    return {name for name, p in parameters.items() if "ndarray" in str(p.annotation)}


def fields_of(function: Callable[..., Any]) -> dict[str, tuple[str, ...]]:
    """Of arguments that are annotated as a named tuple, its fields in order."""
    try:
        hints = get_type_hints(getattr(function, "forward", function))
    except Exception:  # an annotation that cannot be looked up here
        return {}
    found = {name: getattr(kind, "_fields", ()) for name, kind in hints.items()}
    return {name: fields for name, fields in found.items() if fields}


def _annotated(function: Callable[..., Any], kind: re.Pattern[str]) -> bool:
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(kind.search(str(parameter.annotation)) for parameter in parameters)
