"""Checks of arguments that are no tensors: names and numbers. They need no torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Real


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Refuse an unknown option; suggest the nearest known one."""
    known = list(choices)
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} must be one of {known}, got {value!r}{hint}")


def check_positive(name: str, value: float) -> None:
    """Refuse what is no number, and a number that is not finite and above zero."""
    if not (isinstance(value, Real) and math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and > 0, got {value!r}")


def check_not_negative(name: str, value: float) -> None:
    """Refuse a number that is not finite, or below zero."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and >= 0, got {value!r}")


def check_fraction(name: str, value: float) -> None:
    """Refuse a number outside [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {value!r}")
