"""The computations that decide the claims of the ledger, one module a theme.

A claim is decided by a function without arguments that returns a :class:`Finding`. The function is
registered under the claim's id, so that the ledger cannot name evidence that does not exist:

>>> @decides("S0-2")
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

Verdict = Literal["holds", "holds if", "fails", "open"]
VERDICTS: tuple[Verdict, ...] = ("holds", "holds if", "fails", "open")


class Finding(NamedTuple):
    """What recomputing a claim gave."""

    verdict: Verdict
    figures: Mapping[str, float]  #: the measured numbers the verdict rests on, by name


Decision = Callable[[], Finding]
_DECISIONS: dict[str, Decision] = {}


def decides(*claims: str) -> Callable[[Decision], Decision]:
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
    """Every registered decision by claim id; imports all modules of this package."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(_DECISIONS)


def settle(always: bool, sometimes: bool) -> Verdict:
    """``holds`` if it always did, ``holds if`` if only sometimes, else ``fails``."""
    if always:
        return "holds"
    return "holds if" if sometimes else "fails"
