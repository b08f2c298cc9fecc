"""Whether a function turns rewards into rewards, where it pays them, and whom it leaves unpaid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kl_term.audit.batches import Batch
from kl_term.audit.calling import Foreign, Output
from kl_term.audit.layouts import LOW

Shape = Literal["number", "rows", "tokens"]
#: What holds the worth of an answer; a batch of everything may.
_WORTH = {"rewards", "token_rewards", "advantages", "inputs"}


def pays(foreign: Foreign, shape: Shape, probe: Batch) -> bool:
    """Whether a function turns rewards into rewards: it rises with them, and they move no gradient.

    A loss falls where the advantage rises, or has a gradient that the advantage scales. The spread
    of a group's rewards scales the KL that it divides, but without a KL there is no gradient. What
    takes rewards and is nothing at all without a KL was to pay them, and does not.
    """
    if shape == "number" or not foreign.roles & _WORTH:
        return False
    before = foreign.call(probe, LOW)
    rising = [more for row in range(probe.rows) for more in _steps(foreign, probe, before, row)]
    if not rising:
        return _is_nothing_without_kl(foreign, probe)
    return any(_alike(foreign, probe, before, output) for output in rising)


class Payment(NamedTuple):
    """Where the reward of an answer is paid."""

    at_end: bool = False  #: at one of its tokens alone, or nowhere
    early: bool = False  #: that is a token before the last, so that later ones earn nothing of it
    unpaid: tuple[int, ...] = ()  #: answers of the batch whose own reward changes nothing


def payment(foreign: Foreign, shape: Shape, probe: Batch) -> Payment:
    """Of a function that turns rewards into rewards."""
    before = foreign.call(probe, LOW)
    unpaid = [row for row in range(probe.rows) if not [*_steps(foreign, probe, before, row)]]
    if shape != "tokens":
        return Payment(unpaid=tuple(unpaid))
    paid = _paid_tokens(foreign, probe)
    return Payment(
        at_end=len(paid) == 1 or (not paid and "rewards" in foreign.roles),
        early=len(paid) == 1 and paid[0] < int(probe.mask.sum(-1).max()) - 1,
        unpaid=tuple(unpaid),
    )


def _paid_tokens(foreign: Foreign, probe: Batch) -> list[int]:
    """Positions of the longest answer at which more reward is more."""
    more = replace(probe, rewards=probe.rewards * 3, advantages=probe.advantages * 3)
    before, after = (foreign.call(b, LOW).value for b in (probe, more))
    changed = ((after - before).abs() > 1e-9)[probe.mask.sum(-1).argmax()]
    return [int(position) for position in changed.nonzero()]


def _steps(foreign: Foreign, probe: Batch, before: Output, row: int) -> Iterator[Output]:
    """Of more reward for one answer and of less: where what it is paid follows. One may be cut."""
    for step in (1.0, -2.0):
        more = torch.zeros_like(probe.rewards)
        more[row] = step
        worth = more.view(-1, *[1] * (probe.advantages.ndim - 1))
        paid = replace(probe, rewards=probe.rewards + more, advantages=probe.advantages + worth)
        after = foreign.call(paid, LOW)
        if step * float((after.value - before.value)[row].sum()) > 1e-9:
            yield after


def _alike(foreign: Foreign, probe: Batch, before: Output, after: Output) -> bool:
    """Whether the rewards leave the gradient as it was, or there is none without a KL."""
    if before.gradient is None or after.gradient is None:
        return True
    if torch.allclose(before.gradient, after.gradient, rtol=1e-4, atol=1e-9):
        return True
    return foreign.has_beta and _is_zero(foreign.call(probe, 0.0).gradient)


def _is_nothing_without_kl(foreign: Foreign, probe: Batch) -> bool:
    if "rewards" not in foreign.roles or "advantages" in foreign.roles or not foreign.has_beta:
        return False
    without = foreign.call(probe, 0.0)
    return _is_zero(without.gradient) and _is_zero(without.value)


def _is_zero(tensor: Tensor | None) -> bool:
    return tensor is None or bool((tensor == 0).all())
