"""What a loss makes of a token that the reference, or the policy, gives no probability."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kl_term.audit.batches import Batch, random_batch, token_batch
from kl_term.audit.layouts import HIGH
from kl_term.audit.readings import Reading


@dataclass(frozen=True)
class Supports:
    """Of one state; a part that cannot be tried is False."""

    free: bool  #: a token that the reference never gives costs less than one that it seldom gives
    not_a_number: tuple[str, ...]  #: who gives zero probability where value or gradient is NaN


def supports(reading: Reading) -> Supports:
    """By sampled tokens, or by logits of minus infinity beside the sampled token."""
    if reading.fewest > 1 or not reading.foreign.roles & {"ref_logp", "ref_logits", "inputs"}:
        return Supports(False, ())
    if reading.foreign.by_logits:
        return Supports(False, tuple(_nan_of_logits(reading)))
    seldom, never = (_of_token(reading, gap) for gap in (10.0, math.inf))
    if seldom is None or never is None or math.isnan(seldom):
        return Supports(False, ())
    if math.isnan(never):
        return Supports(False, ("the reference gives",))
    return Supports(abs(never) < 0.5 * abs(seldom), ())


def _of_token(reading: Reading, gap: float) -> float | None:
    """The KL of a token whose log-ratio to the reference is this."""
    logp = torch.tensor([-1.0], dtype=torch.float64)
    try:
        part = reading.whole(token_batch(logp, logp - gap, logp), HIGH)
    except Exception:
        return None
    return float(part.value.sum())


def _nan_of_logits(reading: Reading) -> list[str]:
    batch = random_batch(
        rows=3, width=2, vocab_size=4, distance=0.5, staleness=0.06, ragged=False, seed=71
    )
    batch = replace(batch, tokens=batch.tokens % 3)
    last = torch.zeros_like(batch.logits)
    last[..., 3] = -torch.inf
    policy = replace(batch, logits=batch.logits + last, old_logits=batch.old_logits + last)
    both = replace(policy, ref_logits=batch.ref_logits + last)
    cases = {"the policy gives": policy, "both give": both}
    return [name for name, at in cases.items() if _is_nan(reading, at)]


def _is_nan(reading: Reading, batch: Batch) -> bool:
    try:
        part = reading.whole(batch, HIGH)
    except Exception:
        return False
    return bool(part.value.isnan().any()) or bool(part.gradient.isnan().any())
