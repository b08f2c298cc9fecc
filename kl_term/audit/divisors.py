"""The numbers by which a foreign loss is divided, where its caller says them."""

from __future__ import annotations

import torch

from kl_term.audit.calling import Foreign, Output
from kl_term.audit.layouts import HIGH, probe_of
from kl_term.audit.numbers import MADE, numbers_beside, numbers_made, with_number
from kl_term.audit.spellings import role_of, words_of

_DIVISORS = {"norm", "divisor", "length", "len", "horizon"}


def settle_divisors(foreign: Foreign) -> None:
    """A default that divides the whole loss and is named as a length, a count or a divisor is.

    Steps of accumulation are none of these: of one batch they are a factor that nobody asked for.
    """
    numbers = numbers_beside(foreign, integers=True) | numbers_made(foreign)
    foreign.divisors = {
        name.removeprefix(f"{MADE}."): default
        for name, default in numbers.items()
        if _is_named_so(name.rpartition(".")[2]) and _divides(foreign, name, default)
    }


def _is_named_so(name: str) -> bool:
    return role_of(name) in ("width", "count", "lengths") or bool(words_of(name) & _DIVISORS)


def _divides(foreign: Foreign, name: str, default: float) -> bool:
    """Whether twice the number is half the value and half the gradient."""
    probe = probe_of(foreign)

    def at(times: int) -> Output:
        return with_number(foreign, name, times * default).call(probe, HIGH)

    try:
        once, twice = at(1), at(2)
    except Exception:
        return False
    for one, two in ((once.value, twice.value), (once.gradient, twice.gradient)):
        if one is None or two is None or one.shape != two.shape or not bool((one != 0).any()):
            return False
        if not torch.allclose(one, 2 * two, rtol=1e-4, atol=0.0):
            return False
    return True
