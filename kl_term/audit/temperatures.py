"""A loss at its own temperature: of which distributions are the log-probs that it is given?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kl_term.audit.batches import Batch
from kl_term.audit.calling import Foreign
from kl_term.audit.layouts import probe_of
from kl_term.audit.readings import Part, Reading
from kl_term.audit.spellings import role_of


class Tempered(NamedTuple):
    """Temperatures of a loss's defaults that were set to one, and what is not right at these."""

    values: dict[str, float]
    ratio_off: bool = False  #: where policy and sampler agree, their ratio is not one
    kl_off: bool = False  #: where policy and reference agree, their log-ratio is not zero


def temperatures_of(foreign: Foreign) -> dict[str, float]:
    """Those that are not one, of arguments that nobody gave."""
    return {
        name: value
        for name, value in foreign.untold().items()
        if value != 1 and role_of(name) == "temperature"
    }


def divides_logits(reading: Reading) -> dict[str, float]:
    """The temperatures of a loss that takes logits of the policy and log-probs of others: those
    are the log-probs at this temperature."""
    foreign = reading.foreign
    given = foreign.roles & {"old_logp", "ref_logp"}
    return temperatures_of(foreign) if "logits" in foreign.roles and given else {}


def compared(own: Reading, at_one: Reading, values: dict[str, float]) -> Tempered:
    """A loss at its own temperature, on log-probs at this temperature or at one, against the loss
    at one."""
    (temperature, *others) = values.values()
    if others:
        return Tempered(values)
    probe = probe_of(own.foreign)
    cold = Batch(
        **{
            name: getattr(probe, name) / (temperature if "logits" in name else 1)
            for name in ("logits", "ref_logits", "old_logits", "advantages", "rewards")
        },
        tokens=probe.tokens,
        mask=probe.mask,
    )
    pairs = ((replace(cold, logits=probe.logits), cold), (probe, probe))

    def off(part: Callable[[Reading, Batch], Part]) -> bool:
        return not any(_alike(part(own, a).value, part(at_one, b).value) for a, b in pairs)

    return Tempered(
        values,
        ratio_off=own.has_policy_part and off(lambda reading, batch: reading.policy(batch)),
        kl_off=off(lambda reading, batch: reading.kl(batch)),
    )


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5)
