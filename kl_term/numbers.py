"""Numbers as text: rounded once, in one way, wherever the book shows them."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Mapping
from typing import Any

#: Half of the 95% interval of a normal mean, in standard errors.
HALF_WIDTH = 1.96

_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_EXPONENT = re.compile(r"^(?P<mantissa>.*)[eE](?P<sign>[+-])0*(?P<digits>\d+)$")


def format_value(key: str, value: Any, spec: str) -> str:
    """The text of ``value``: ``∞`` for infinity, a true minus sign, powers of ten as superscripts.

    Raises:
        ValueError: NaN, several elements, an unrounded number, or a bad ``spec``; names ``key``.
    """
    if isinstance(value, str):
        return value
    number = _scalar(key, value)
    if math.isnan(number):
        raise ValueError(f"record key {key!r}: the value is NaN; nothing to quote")
    if math.isinf(number):
        return "∞" if number > 0 else "−∞"
    if isinstance(number, float) and not spec:
        raise ValueError(f"record key {key!r}: give a format such as '.4f' to round a float")
    try:
        text = format(number, spec)
    except ValueError as error:
        raise ValueError(f"record key {key!r}: format {spec!r} does not apply: {error}") from None
    if not any(digit in text for digit in "123456789"):
        text = text.removeprefix("-")
    exponent = _EXPONENT.match(text)
    if exponent:
        power = exponent["sign"].replace("+", "") + exponent["digits"]
        text = f"{exponent['mantissa']} × 10{power.translate(_SUPERSCRIPTS)}"
    return re.sub("^-", "−", text)


def _scalar(key: str, value: Any) -> int | float:
    try:
        number = value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):
        raise ValueError(f"record key {key!r}: expected one number, got {len(value)}") from None
    if type(number) not in (int, float):
        raise ValueError(
            f"record key {key!r}: expected a number or text, got {type(value).__name__}"
        )
    return number


def fill(phrase: str, numbers: Mapping[str, float]) -> str:
    """A phrase with its numbers in place: ``{name:.3g}`` is formatted as :func:`format_value` does.

    An exact zero shows as 0 under every format.
    """
    return _Phrase().format(phrase, **numbers)


class _Phrase(string.Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        return "0" if value == 0 else format_value("figure", value, spec or ".4g")


def with_interval(row: Mapping[str, Any], spec: str, mean: str = "mean") -> str:
    """A mean and its interval in one piece of text: ``+0.12 (+0.05 to +0.19)``.

    ``mean`` is the name under which the row has it.
    """
    middle, low, high = (format_value(name, row[name], spec) for name in (mean, "low", "high"))
    return f"{middle} ({low} to {high})"
