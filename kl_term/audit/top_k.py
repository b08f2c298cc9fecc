"""What is left of a loss where only the reference's likeliest tokens are known."""

from __future__ import annotations

from dataclasses import replace

from kl_term.audit.readings import Reading
from kl_term.audit.spellings import OF_TOP_K
from kl_term.audit.trees import expected_gradient, state

#: Of how many tokens how many are given.
_VOCABULARY, _KEPT = 5, 2


def pushes_at_reference(reading: Reading) -> bool:
    """Whether, given two tokens of five, it has a gradient where policy and reference agree.

    Given all of them it may be a KL all the same.
    """
    if not reading.foreign.roles & {*OF_TOP_K}:
        return False
    some = replace(reading, foreign=replace(reading.foreign, kept=_KEPT, notes=set()))
    apart = state(_VOCABULARY, seed=3).fresh()
    agreed = replace(apart, ref_logits=apart.logits)
    pushed, moved = (
        expected_gradient(some.kl, at, rows=reading.fewest).norm() for at in (agreed, apart)
    )
    return bool(pushed > 1e-3 * moved)
