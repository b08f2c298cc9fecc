"""How many answers a call needs, where one alone has nothing to be compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kl_term.audit.batches import Batch
from kl_term.audit.layouts import HIGH

if TYPE_CHECKING:
    from kl_term.audit.readings import Part, Reading


def fewest(reading: Reading, probe: Batch) -> int:
    """How many answers a call needs to return numbers: a leave-one-out mean needs two, and what
    is left of an answer beside its own mean is nothing."""
    moves = reading.kind == "loss" and _moves(reading.kl, probe)
    for rows in (1, 2):
        try:
            part = reading.whole(probe.only(list(range(rows))), HIGH)
        except Exception:
            continue
        if reading.kind == "reward":
            centred = not bool((part.value.abs() > 1e-12).any())
        else:
            centred = moves and not _moves(reading.kl, probe.only(list(range(rows))))
        finite = bool(part.value.isfinite().all()) and bool(part.gradient.isfinite().all())
        if finite and not centred:
            return rows
    return 3


def fewest_of_policy(reading: Reading, probe: Batch) -> int:
    """How many answers have advantages of their own: of a group's mean nothing is left of one."""
    if not reading.has_policy_part or not _moves(reading.policy, probe):
        return reading.fewest
    turned = replace(probe, advantages=-probe.advantages, rewards=-probe.rewards)

    def enough(count: int) -> bool:
        rows = list(range(count))
        return any(_moves(reading.policy, batch.only(rows)) for batch in (probe, turned))

    return next((n for n in (1, 2) if n >= reading.fewest and enough(n)), 3)


def _moves(part: Callable[[Batch], Part], batch: Batch) -> bool:
    return bool((part(batch).gradient.abs() > 1e-12).any())
