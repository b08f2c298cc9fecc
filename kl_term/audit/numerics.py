"""Where a loss loses its gradient, overflows, or has no digits left."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kl_term.audit.batches import token_batch
from kl_term.audit.layout import Layout
from kl_term.audit.readings import Reading

#: How far (nats) the log-ratio to the reference is followed.
FURTHEST = 30.0
#: KLs near the reference at which digits are counted, in nats.
SMALL = (1e-4, 1e-6)


@dataclass(frozen=True)
class Numerics:
    """Of the KL of one token on fresh samples."""

    #: Log-ratios (nats) below and above which the gradient is exactly zero; NaN without a zone.
    dead_below: float
    dead_above: float
    #: The smallest log-ratio (nats) at which the slope has the other sign than near the reference.
    pushes_away: float
    overflow: str | None  #: what a log-ratio of 100 in float32 becomes, if no number
    stale_overflow: str | None  #: what a ratio to the sampler that overflows becomes, if no number
    filter_fails: bool  #: a token whose ratio is large is dropped, and NaN where it overflows
    #: Relative error of the value by (type, KL).
    digits: dict[tuple[str, float], float]


def numerics(reading: Reading) -> Numerics:
    """Token by token; a loss over the vocabulary is not asked for its zones."""
    if reading.by_logits or reading.kind == "reward" or reading.fewest > 1:
        return Numerics(math.nan, math.nan, math.nan, None, None, False, {})
    slopes = _remembered(lambda log_ratio: _slopes(reading, log_ratio))
    below, above = dead_zone(slopes, furthest=FURTHEST)
    stale = _overflow(reading, 0.5, 100.0)
    return Numerics(
        below,
        above,
        _pushes_away(slopes),
        _overflow(reading, 100.0, 0.0),
        stale,
        stale == "NaN" and reading.has_policy_part and _filtered(reading),
        _digits(reading),
    )


def dead_zone(
    slopes: Callable[[Tensor], Tensor], *, furthest: float, resolution: float = 1e-3
) -> tuple[float, float]:
    """Log-ratios below and above which a slope is exactly zero; NaN where there is no such zone.

    Args:
        slopes: of log-ratios [N], the derivative of the loss by the log-prob of each token.
        furthest: how far to look on both sides, in nats.
        resolution: of an edge, in nats.
    """
    steps = furthest * torch.linspace(0.02, 1.0, 17, dtype=torch.float64) ** 2
    at = torch.cat([-steps.flip(0), steps])
    alive = slopes(at) != 0
    if not bool(alive.any()):
        return 0.0, 0.0
    first, last = alive.nonzero().flatten()[[0, -1]].tolist()
    low = (
        math.nan
        if first == 0
        else _edge(slopes, at[first - 1].item(), at[first].item(), resolution)
    )
    high = math.nan
    if last < len(at) - 1:
        high = _edge(slopes, at[last + 1].item(), at[last].item(), resolution)
    return low, high


def _remembered(slopes: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Asked once for each log-ratio."""
    known: dict[float, Tensor] = {}

    def of(log_ratio: Tensor) -> Tensor:
        asked = log_ratio.tolist()
        new = [x for x in asked if x not in known]
        if new:
            known.update(zip(new, slopes(torch.tensor(new, dtype=torch.float64)), strict=True))
        return torch.stack([known[x] for x in asked])

    return of


def _pushes_away(slopes: Callable[[Tensor], Tensor]) -> float:
    """NaN where it does so nowhere, or where near the reference it pulls not from both sides."""
    steps = FURTHEST * torch.linspace(0.02, 1.0, 17, dtype=torch.float64) ** 2
    above, below = slopes(steps), slopes(-steps)
    if not bool(above[0] > 0 and below[0] < 0):
        return math.nan
    for wrong, sign in ((above < 0, 1), (below > 0, -1)):
        if bool(wrong.any()):
            return sign * steps[wrong][0].item()
    return math.nan


def _edge(
    slopes: Callable[[Tensor], Tensor], dead: float, alive: float, resolution: float
) -> float:
    while abs(alive - dead) > resolution:
        middle = (alive + dead) / 2
        if bool(slopes(torch.tensor([middle], dtype=torch.float64)) != 0):
            alive = middle
        else:
            dead = middle
    return alive


def _slopes(reading: Reading, log_ratio: Tensor) -> Tensor:
    logp = torch.full_like(log_ratio, -FURTHEST - 1)
    batch = token_batch(logp, logp - log_ratio, logp)
    if reading.separable:
        return reading.kl(batch).gradient.flatten()
    return torch.cat([reading.kl(batch.only([i])).gradient.flatten() for i in range(batch.rows)])


def _overflow(reading: Reading, ref_log_ratio: float, log_ratio: float) -> str | None:
    """The worst of both signs, in float32."""
    narrow = _in(reading, torch.float32)
    if narrow is None:
        return None
    worst = None
    for sign in (1.0, -1.0):
        start = torch.tensor([-110.0, -1.0]).double()
        logp = start[:1] if sign > 0 or log_ratio == 0 else start[1:]
        batch = token_batch(logp, logp - sign * ref_log_ratio, logp - log_ratio, advantage=1.0)
        try:
            part = narrow.whole(batch, 0.5)
        except Exception:
            return None
        for tensor in part:
            if bool(tensor.isnan().any()):
                return "NaN"
            if bool(tensor.isinf().any()):
                worst = "infinity"
    return worst


def _filtered(reading: Reading) -> bool:
    """Whether a token at a ratio of 20 nats has neither value nor gradient in the policy loss, and
    has them at its sampler."""
    logp = torch.tensor([-1.0]).double()

    def moves(log_ratio: float) -> bool:
        part = reading.policy(token_batch(logp, logp - 0.5, logp - log_ratio, advantage=1.0))
        return any(bool((tensor != 0).any()) for tensor in part)

    return moves(0.0) and not moves(20.0)


def _in(reading: Reading, floats: torch.dtype) -> Reading | None:
    foreign = replace(reading.foreign, layout=_narrowed(reading.foreign.layout, floats))
    return replace(reading, foreign=foreign)


def _narrowed(layout: Layout, floats: torch.dtype) -> Layout:
    return layout._replace(floats=floats)


def _spread(reading: Reading, kl: float) -> float:
    """How far the values of one log-ratio lie from their mean, over log-probs of all sizes."""
    logp = -torch.linspace(0.1, 4.0, 13, dtype=torch.float64)
    batch = token_batch(logp, logp - math.sqrt(2 * kl), logp)
    values = torch.stack([reading.kl(batch.only([i])).value.mean() for i in range(len(logp))])
    size = values.mean().abs()
    return 1.0 if size == 0 else float((values - values.mean()).abs().max() / size)


def _digits(reading: Reading) -> dict[tuple[str, float], float]:
    """Relative error of the value against the same numbers in float64."""
    found = {}
    if reading.coarse:
        found = {("its own precision", kl): _spread(reading, kl) for kl in SMALL}
    for name, floats in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        narrow = _in(reading, floats)
        for kl in SMALL:
            log_ratio = torch.tensor([math.sqrt(2 * kl)]).double()
            logp = torch.tensor([-0.05]).double().to(floats).double()
            ref_logp = (logp - log_ratio).to(floats).double()
            batch = token_batch(logp, ref_logp, logp)
            try:
                exact = reading.kl(batch).value
                rounded = narrow.kl(batch).value if narrow else exact
            except Exception:
                continue
            if float(exact.abs().max()) > 1e-300:
                found[name, kl] = float(((rounded - exact) / exact).abs().max())
    return found
