"""Refuse a function that answers no two times alike."""

from __future__ import annotations

from dataclasses import replace

import torch

from kl_term.audit.calling import Foreign, Output, random_states
from kl_term.audit.layouts import HIGH, LOW, probe_of
from kl_term.errors import UserError


def refuse_changing(foreign: Foreign) -> None:
    """Two calls on the same numbers must agree, whatever was called between them."""
    probe = probe_of(foreign)
    other = replace(probe.fresh(), advantages=-probe.advantages)
    before = random_states()
    first = foreign.call(probe, HIGH)
    drew = random_states() != before
    foreign.call(other, LOW)
    again = foreign.call(probe, HIGH)
    if not _same(first, again):
        why = "draws random numbers" if drew else "keeps state"
        raise UserError(f"{foreign.name}: {why}: two calls on the same numbers differ")


def _same(one: Output, other: Output) -> bool:
    if one.value.shape != other.value.shape or (one.gradient is None) != (other.gradient is None):
        return False
    same = torch.equal(one.value.nan_to_num(), other.value.nan_to_num())
    return same and (
        one.gradient is None
        or other.gradient is None
        or torch.equal(one.gradient.nan_to_num(), other.gradient.nan_to_num())
    )
