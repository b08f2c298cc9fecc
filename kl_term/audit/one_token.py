"""The policy loss of one token: alone, or in a group where a call needs more answers than one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kl_term.audit.batches import Batch, token_batch
from kl_term.audit.readings import Part, Reading

#: Log-prob of the tokens of the other answers, which their own policy drew.
_BESIDE = -1.0


def policy_of_token(
    reading: Reading, logp: float, ref_logp: float, log_ratio: float, advantage: float
) -> Part:
    """Value and gradient of one token at a log-ratio to its sampler (nats).

    In a group the others share minus the advantage, so that no mean is taken off, and their part
    of the value is left out: where the ratio is one, the value of a token is its derivative.
    """
    if reading.fewest_of_policy == 1:
        return reading.policy(_batch([logp], [ref_logp], [log_ratio], [advantage]))
    others = reading.fewest_of_policy - 1
    worth = [advantage, *[-advantage / others] * others]
    here, at_sampler = (
        reading.policy(
            _batch(
                [logp] + [_BESIDE] * others,
                [ref_logp] + [_BESIDE] * others,
                [shift] + [0.0] * others,
                worth,
            )
        )
        for shift in (log_ratio, 0.0)
    )
    if here.value.ndim:
        return Part(here.value[:1], here.gradient[:1])
    beside = at_sampler.gradient[1:].sum()
    value = here.value - beside
    return Part(torch.where(value.abs() < 1e-6 * beside.abs(), 0.0, value), here.gradient[:1])


def _batch(
    logp: Sequence[float],
    ref_logp: Sequence[float],
    log_ratio: Sequence[float],
    worth: Sequence[float],
) -> Batch:
    at, reference, moved = (torch.tensor(x).double() for x in (logp, ref_logp, log_ratio))
    worths = torch.tensor(worth).double()
    return replace(token_batch(at, reference, at - moved), advantages=worths, rewards=worths)
