"""Which entry of a result is trained on, where a function returns several beside each other.

A policy loss may come with the KL that the caller multiplies by its coefficient and adds, and
with the two terms of which it is the larger one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kl_term.audit.batches import Batch, random_batch
from kl_term.audit.calling import Foreign
from kl_term.audit.layouts import HIGH, probe_of
from kl_term.audit.paying import pays
from kl_term.audit.returning import Key, Parts


def settle_parts(foreign: Foreign) -> None:
    """Where the first entry reads no reference, look for one that does, or for a KL beside it."""
    probe = probe_of(foreign)
    entries = foreign.entries(probe, HIGH)
    if len(entries) < 2 or _pays(foreign, probe):
        return
    other = replace(probe, ref_logits=probe.ref_logits.flip(-1))
    turned = replace(probe, advantages=-probe.advantages, rewards=-probe.rewards)
    of_reference = _moved(entries, foreign.entries(other, HIGH))
    of_worth = _moved(entries, foreign.entries(turned, HIGH))
    first, *_ = entries
    if first in of_reference:
        return
    whole = [key for key in entries if key in of_reference & of_worth]
    kls = [key for key in entries if key in of_reference - of_worth]
    if whole:
        foreign.parts = Parts(whole[0])
        return
    clipped = foreign.entries(_far(), HIGH)
    loss = _largest({key: clipped[key] for key in entries if key in of_worth}, first)
    if kls and _is_multiplied_outside(foreign, probe):
        _leave_coefficient(foreign)
        foreign.parts = Parts(loss, next((k for k in kls if entries[k].requires_grad), kls[0]))
    elif loss != first:
        foreign.parts = Parts(loss)


def said(parts: Parts) -> str:
    """What was read as what."""
    if parts.kl is None:
        return f"{_named(parts.loss)} of what it returns"
    return (
        f"{_named(parts.loss)} of what it returns, plus the coefficient, which its caller holds, "
        f"times {_named(parts.kl)}, the KL"
    )


def _far() -> Batch:
    """Stale answers, of which a clip cuts some tokens."""
    return random_batch(
        rows=4, width=4, vocab_size=5, distance=0.5, staleness=1.0, ragged=True, seed=13
    )


def _named(key: Key) -> str:
    return f"entry {key + 1}" if isinstance(key, int) else repr(key)


def _pays(foreign: Foreign, probe: Batch) -> bool:
    shape = foreign.call(probe, HIGH).value.shape
    return len(shape) > 0 and pays(foreign, "tokens" if len(shape) > 1 else "rows", probe)


def _moved(before: Mapping[Key, Tensor], after: Mapping[Key, Tensor]) -> set[Key]:
    """The entries that changed."""
    return {key for key, entry in before.items() if not torch.equal(entry, after[key])}


def _largest(losses: Mapping[Key, Tensor], first: Key) -> Key:
    """The one that is nowhere below the others, and at some tokens the first: a clipped loss
    beside both of its terms. Else the first."""
    for key, entry in losses.items():
        above = all(bool((entry >= other).all()) for other in losses.values())
        apart = entry != losses[first] if first in losses else torch.zeros_like(entry).bool()
        if above and bool(apart.any()) and not bool(apart.all()):
            return key
    return first


def _is_multiplied_outside(foreign: Foreign, probe: Batch) -> bool:
    """Whether it takes no coefficient, or one of a configuration that it does not read.

    What cannot be computed with stands in its place.
    """
    if not foreign.has_beta:
        return True
    if foreign.beta_path is None:
        return False
    try:
        unread = foreign.entries(probe, object())  # type: ignore[arg-type]
    except Exception:
        return False
    return not _moved(foreign.entries(probe, HIGH), unread)


def _leave_coefficient(foreign: Foreign) -> None:
    """The configuration keeps its own."""
    if foreign.beta_path is not None:
        foreign.plan.guessed.pop(foreign.beta_path, None)
        foreign.beta_path = None
