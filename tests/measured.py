"""Measurements that are written down: what a condition decides from, with no dump behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kl_term.diagnosis.causes import CAUSES
from kl_term.diagnosis.schema import (
    Identity,
    Interval,
    KLEstimate,
    Measured,
    Rollouts,
    SequenceShare,
    Settings,
    Shown,
    StepKL,
    Tail,
)
from kl_term.kl.choice import KLChoice

#: What every dump has numbers of; here of one in which nothing is wrong.
SOUND = {
    "constant_end_share": 0.0,
    "constant_inner_share": 0.0,
    "impossible_share": 0.0,
    "equal_ends": 0.0,
    "masked_when_scored_share": 0.0,
    "masked_when_scored_tokens": 0.0,
    "clamped_share": 0.0,
    "largest_ratio_over_mean": 30.0,
}


def rollouts(*, sequences: int = 25, length: int = 8, **columns: Any) -> Rollouts:
    """Sequences of one length; a column is one number for all tokens or [N] of them."""
    tokens = sequences * length
    given = {"logp": -1.25, "old_logp": -1.375, "ref_logp": -1.5} | columns
    fields = {name: given.pop(name) for name in ("filled", "filler", "has_old_logp") & given.keys()}
    return Rollouts(
        sequence=np.repeat(np.arange(sequences), length),
        position=np.tile(np.arange(length), sequences),
        **{name: np.broadcast_to(values, tokens) for name, values in given.items()},
        **fields,
    )


#: Too few sequences for an interval to decide anything.
FEW = rollouts(sequences=4, length=50)


def interval(value: float, reach: float = 0.01) -> Interval:
    return Interval(value=value, low=value - reach, high=value + reach)


def measured(
    numbers: Mapping[str, float] | None = None,
    *,
    of: Rollouts | None = None,
    estimates: Mapping[str, float | Interval] | None = None,
    identities: Mapping[str, Interval] | None = None,
    tails: Mapping[str, float | None] | None = None,
    intervals: Mapping[str, Interval] | None = None,
    by_step: tuple[float, ...] = (),
    top: tuple[SequenceShare, ...] = (),
    kl: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Measured:
    """A sound dump with changes.

    Args:
        numbers: beside those of ``SOUND``.
        of: the tokens.
        estimates: estimator, or samples and estimator -> the KL; each 0.1 as logged.
        identities: ratio -> its mean.
        tails: ratio -> tail index, where 0.6 is the largest trusted.
        intervals: name -> interval.
        by_step: KL by k3 of each step.
        top: sequences with most of the KL.
        kl: what is known of the term.
        settings: the others.
    """
    read = {"k1": 0.1, "k2": 0.1, "k3": 0.1} | dict(estimates or {})
    return Measured(
        of or rollouts(),
        Settings(kl=None if kl is None else KLChoice(**kl), **settings),
        [_estimate(name, value) for name, value in read.items()],
        [Tail(ratio=ratio, k=k, threshold=0.6) for ratio, k in (tails or {}).items()],
        [Identity(ratio=ratio, mean=mean) for ratio, mean in (identities or {}).items()],
        list(top),
        [StepKL(step=i, tokens=9, k1=0.0, k3=kl) for i, kl in enumerate(by_step)],
        dict(intervals or {}),
        SOUND | dict(numbers or {}),
    )


def _estimate(name: str, value: float | Interval) -> KLEstimate:
    *samples, estimator = name.split()
    found = value if isinstance(value, Interval) else interval(value)
    return KLEstimate(
        estimator=estimator, samples=samples[0] if samples else "logged", interval=found
    )


class Said(NamedTuple):
    """What a report says of a cause."""

    severity: str
    title: str
    advice: str
    evidence: dict[str, float | int | str]


def said(condition: Callable[[Measured], Shown | None], measurements: Measured) -> Said:
    """The words and numbers of a condition that holds."""
    shown = condition(measurements)
    assert shown is not None, "says nothing"
    cause = next(cause for cause in CAUSES if cause.when is condition)
    title, advice = (
        (text if isinstance(text, str) else text[shown.case]).format(**shown.words)
        for text in (cause.title, cause.advice)
    )
    return Said(shown.severity or cause.severity, title, advice, shown.evidence)
