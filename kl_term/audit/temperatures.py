"""A loss at its own temperature: of which distributions are the log-probs that it is given?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kl_term.audit.batches import Batch
from kl_term.audit.calling import Foreign
from kl_term.audit.layouts import HIGH, probe_of
from kl_term.audit.numbers import numbers_beside, numbers_held, numbers_made, with_number
from kl_term.audit.readings import Part, Reading
from kl_term.audit.spellings import role_of
from kl_term.audit.trees import expected_gradient, state


class Tempered(NamedTuple):
    """Temperatures of a loss's defaults that were set to one, and what is not right at these."""

    values: dict[str, float]
    ratio_off: bool = False  #: where policy and sampler agree, their ratio is not one
    kl_off: bool = False  #: where policy and reference agree, their log-ratio is not zero


def temperatures_of(foreign: Foreign) -> dict[str, float]:
    """Those that are not one and change something, of what nobody gave."""
    return {
        path: value
        for path, value in numbers_beside(foreign).items()
        if value not in (0, 1) and _is_temperature(path)
        if "." not in path or _acts(foreign, path)
    }


def _acts(foreign: Foreign, path: str) -> bool:
    """Whether what a configuration holds is read here."""
    probe = probe_of(foreign)
    usual, at_one = (f.call(probe, HIGH) for f in (foreign, with_number(foreign, path, 1.0)))
    return not torch.equal(usual.value, at_one.value)


def divides_logits(reading: Reading) -> dict[str, float]:
    """The temperatures of a loss that takes logits of the policy and log-probs of others: those
    are the log-probs at this temperature."""
    foreign = reading.foreign
    given = foreign.reads & {"old_logp", "ref_logp"}
    return temperatures_of(foreign) if "logits" in foreign.reads and given else {}


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
    raw = {"logits", *({"ref_logits", "old_logits"} & own.foreign.reads)}
    warm = replace(cold, **{name: getattr(probe, name) for name in raw})
    pairs = ((warm, cold), (probe, probe))

    def off(part: Callable[[Reading, Batch], Part]) -> bool:
        return not any(_alike(part(own, a).value, part(at_one, b).value) for a, b in pairs)

    return Tempered(
        values,
        ratio_off=own.has_policy_part and off(lambda reading, batch: reading.policy(batch)),
        kl_off=off(lambda reading, batch: reading.kl(batch)),
    )


def one_sided(reading: Reading) -> tuple[str, ...]:
    """Temperatures of one that divide the logits of one side alone: at another they push where
    policy and reference agree."""
    foreign = reading.foreign
    if not {"logits", "ref_logits"} <= foreign.reads or reading.fewest > 1:
        return ()
    held = numbers_beside(foreign, integers=True) | numbers_held(foreign) | numbers_made(foreign)
    named = [p for p, x in held.items() if x == 1 and _is_temperature(p)]
    return tuple(path for path in named if _pushes(reading, path))


def _is_temperature(path: str) -> bool:
    return role_of(path.rpartition(".")[2]) == "temperature"


def _pushes(reading: Reading, path: str) -> bool:
    apart = state(3, seed=3).fresh()
    agreed = replace(apart, ref_logits=apart.logits)
    hot = replace(reading, foreign=with_number(reading.foreign, path, 2.0))
    try:
        pushed, usual = (
            expected_gradient(of.kl, at).norm() for of, at in ((hot, agreed), (reading, apart))
        )
    except Exception:
        return False
    return bool(pushed > 1e-3 * usual)


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5)
