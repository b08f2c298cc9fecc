"""An audit as one assertion of a test suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kl_term.audit.auditing import audit
from kl_term.audit.names import Level, Samples
from kl_term.audit.report import Audit
from kl_term.kl.term import KLTerm
from kl_term.plain_checks import check_choice

_LEVELS: dict[str, Level] = {"token": "state", "state": "state", "sequence": "sequence"}


def assert_minimises(
    loss: Callable[..., Any],
    divergence: str,
    *,
    samples: Samples = "fresh",
    level: str = "token",
    **how: Any,
) -> Audit:
    """A loss minimises a divergence in expectation, with a positive coefficient.

    Args:
        loss, how: as :func:`kl_term.audit.auditing.audit`.
        divergence: such as ``reverse KL``.
        samples: ``fresh`` or ``stale``.
        level: ``token`` (at a state) or ``sequence`` (over whole answers).

    Raises:
        AssertionError: what it minimises instead, and the first finding.
    """
    check_choice("samples", samples, ("fresh", "stale"))
    check_choice("level", level, _LEVELS)
    found = audit(loss, **how)
    name = found.expected[samples][_LEVELS[level]].known
    if name != divergence:
        raise AssertionError(
            f"{found.name} minimises {name} on {samples} samples at level {level}, not "
            f"{divergence}{_first(found)}"
        )
    return found


def assert_term(
    loss: Callable[..., Any],
    term: KLTerm,
    *,
    aggregation: str | None = None,
    scale: float = 1.0,
    **how: Any,
) -> Audit:
    """A loss is a term under an aggregation, value and gradient, at the coefficient asked for.

    Raises:
        AssertionError: what it is instead, and the first finding.
    """
    found = audit(loss, **how)
    is_ = found.term.name if found.term else "no term of ours"
    if found.term != term:
        raise AssertionError(f"{found.name} is {is_}, not {term.name}{_first(found)}")
    if aggregation is not None and found.aggregation != aggregation:
        raise AssertionError(
            f"{found.name} is aggregated by {found.aggregation}, not {aggregation}{_first(found)}"
        )
    if found.scale is None or abs(found.scale - scale) > 1e-4 * abs(scale):
        raise AssertionError(
            f"{found.name} has {found.scale:.6g} times the coefficient asked for, not {scale:.6g}"
        )
    return found


def _first(found: Audit) -> str:
    return f": {found.findings[0].says}; {found.findings[0].advice}" if found.findings else ""
