"""A divergence that has no name here: least at the reference, and followed by its own gradient."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kl_term.audit.batches import Batch
from kl_term.audit.readings import Reading
from kl_term.audit.trees import expected_gradient, state
from kl_term.kl.enumeration import exact_kl_gradient

#: Where on the way from the reference the value is asked for.
_ALONG = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_STEP = 1e-3
_STATES = (3, 4, 5)


def is_divergence(reading: Reading) -> bool:
    """Whether a sum over the vocabulary rises on every way from the reference, by its gradient.

    So do skewed KLs and the generalised Jensen-Shannon divergence, whatever their parameter. A
    term that reads which token was drawn, or whose gradient is not that of its value, is none.
    """
    if not reading.by_logits or reading.narrow or reading.fewest > 1:
        return False
    return all(_rises(reading, seed) for seed in _STATES)


def size_of(reading: Reading) -> float:
    """The norm of the expected gradient at a state, over that of the reverse KL."""
    place = state(5, seed=_STATES[0]).fresh()
    reverse = exact_kl_gradient(place.logits, place.ref_logits, direction="reverse")
    return float(expected_gradient(reading.kl, place).norm() / reverse.norm())


def _rises(reading: Reading, seed: int) -> bool:
    place = state(5, seed=seed).fresh()
    batch = place.answers().only([0])
    if not torch.equal(_value(reading, batch), _value(reading, place.answers().only([1]))):
        return False
    way = batch.logits - batch.ref_logits

    def at(distance: float) -> Batch:
        return replace(batch, logits=batch.ref_logits + distance * way)

    values = torch.stack([_value(reading, at(distance)) for distance in _ALONG])
    near, far = (_value(reading, at(0.5 + step)) for step in (-_STEP, _STEP))
    slope = (reading.kl(at(0.5)).gradient * way).sum()
    own = bool((slope - (far - near) / (2 * _STEP)).abs() < 1e-4 * slope.abs())
    return own and bool((values.diff() > 0).all())


def _value(reading: Reading, batch: Batch) -> Tensor:
    return reading.kl(batch).value.sum()
