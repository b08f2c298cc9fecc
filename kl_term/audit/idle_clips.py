"""Limits of a loss that limit nothing, whatever they are and wherever the ratio is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kl_term.audit.batches import Batch, random_batch
from kl_term.audit.calling import Foreign, Output
from kl_term.audit.layouts import HIGH
from kl_term.audit.numbers import numbers_beside, numbers_held, with_number
from kl_term.audit.readings import Reading
from kl_term.audit.spellings import role_of, words_of

#: A smaller default keeps a denominator from zero.
_SMALLEST = 1e-4
#: What these limit is not the ratio.
_OF_OTHERS = {"value", "values", "vf", "reward", "rewards", "grad", "kl", "norm", "entropy", "adv"}


def idle_clips(reading: Reading) -> tuple[str, ...]:
    """Names of clip ranges that change neither value nor gradient of stale samples."""
    foreign = reading.foreign
    batches = [*_stale(reading)]
    try:
        usual = [foreign.call(batch, HIGH) for batch in batches]
    except Exception:
        return ()
    return tuple(
        name
        for name, default in _limits(foreign)
        if _is_idle(foreign, name, default, batches, usual)
    )


def _limits(foreign: Foreign) -> Iterator[tuple[str, float]]:
    """Those of the signature and of the configurations that it is given."""
    named = numbers_beside(foreign) | numbers_held(foreign)
    named |= {name: 0.2 for name, role in foreign.plan.roles.items() if role == "clip"}
    for path, default in named.items():
        name = path.rpartition(".")[2]
        of_ratio = role_of(name) == "clip" and not words_of(name) & _OF_OTHERS
        if of_ratio and _SMALLEST <= default < 1:  # a dual clip at 3 is seldom met
            yield path, default


def _is_idle(
    foreign: Foreign, path: str, default: float, batches: list[Batch], usual: list[Output]
) -> bool:
    """Whether no other limit can be called that changes anything."""
    called = False
    for limit in (0.02 * default, 1.01, 10 * default):
        try:
            found = [with_number(foreign, path, limit).call(batch, HIGH) for batch in batches]
        except Exception:
            continue
        called = True
        if not all(_same(a, b) for a, b in zip(found, usual, strict=True)):
            return False
    return called


def _stale(reading: Reading) -> Iterator[Batch]:
    """Every answer on one side of its sampler, for both signs of the advantage."""
    batch = random_batch(
        rows=4,
        width=5,
        vocab_size=4,
        distance=0.4,
        staleness=0.1,
        ragged=reading.ragged,
        seed=71,
    )
    chosen = torch.zeros_like(batch.logits).scatter(-1, batch.tokens.unsqueeze(-1), 1.0)
    for shift in (1.5, -1.5):
        for sign in (1.0, -1.0):
            yield replace(
                batch,
                old_logits=batch.logits + shift * chosen,
                advantages=sign * batch.advantages.abs(),
                rewards=sign * batch.rewards,
            )


def _same(one: Output, other: Output) -> bool:
    if not torch.equal(one.value, other.value):
        return False
    if one.gradient is None or other.gradient is None:
        return one.gradient is other.gradient
    return torch.equal(one.gradient, other.gradient)
