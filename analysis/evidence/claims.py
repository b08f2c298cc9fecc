"""How a chapter decides a claim of the ledger.

A claim is decided by a function without arguments that returns a :class:`Finding`. It stands in the
module of the chapter that shows it, registered under the claim's id, so that the ledger cannot name
evidence that does not exist:

>>> @claim("S0-2")
... def k3_is_unbiased() -> Finding: ...

The verdict is *computed* from the measured figures by comparison with stated tolerances; it is
never typed in. ``book/claims.yaml`` records verdict and figures, and ``analysis claims`` refuses
any disagreement between the two.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kl_term.kl.enumeration import relative_error

Verdict = Literal["holds", "holds if", "fails", "open"]
VERDICTS: tuple[Verdict, ...] = ("holds", "holds if", "fails", "open")

#: Largest difference of two enumerated numbers of order one that a claim calls equal.
EXACT = 1e-12


class Finding(NamedTuple):
    """What recomputing a claim gave."""

    verdict: Verdict
    figures: Mapping[str, float]  #: the measured numbers the verdict rests on, by name


Decision = Callable[[], Finding]
_DECISIONS: dict[str, Decision] = {}


def claim(*claims: str) -> Callable[[Decision], Decision]:
    """Register the decorated function as the one that decides these claims.

    Raises:
        ValueError: if another function already decides one of them.
    """

    def register(decision: Decision) -> Decision:
        for claim in claims:
            known = _DECISIONS.get(claim)
            if known is not None and known.__qualname__ != decision.__qualname__:
                raise ValueError(
                    f"claim {claim} is decided by {known.__qualname__} and "
                    f"{decision.__qualname__}: keep one"
                )
            _DECISIONS[claim] = decision
        return decision

    return register


def decisions() -> dict[str, Decision]:
    """Every registered decision by claim id; imports all chapters."""
    chapters = importlib.import_module("analysis.chapters")
    for module in pkgutil.walk_packages(chapters.__path__, "analysis.chapters."):
        importlib.import_module(module.name)
    return dict(_DECISIONS)


def judge(always: bool, sometimes: bool) -> Verdict:
    """``holds`` if it always did, ``holds if`` if only sometimes, else ``fails``."""
    if always:
        return "holds"
    return "holds if" if sometimes else "fails"


def largest(values: Tensor) -> float:
    """The largest absolute value."""
    return values.abs().max().item()


def median(values: Tensor) -> float:
    """The median, as torch takes it: the lower one of two in the middle."""
    return values.median().item()


def percentiles(values: Tensor) -> dict[str, Tensor]:
    """``p10``, ``median`` and ``p90`` over the last dimension, interpolated."""
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=values.dtype)
    return dict(zip(("p10", "median", "p90"), values.quantile(levels, dim=-1), strict=True))


def band(values: Tensor) -> dict[str, float]:
    """:func:`percentiles` of one row of values, as numbers."""
    return {name: value.item() for name, value in percentiles(values.flatten()).items()}


def share(events: Tensor) -> float:
    """How often a condition is met."""
    return events.double().mean().item()


def error_of(gradient: Tensor, exact: Tensor, *, worst: bool = False) -> float:
    """Median relative error over the rows of [N, V] and [N, V], or the largest."""
    errors = relative_error(gradient, exact)
    return largest(errors) if worst else median(errors)
