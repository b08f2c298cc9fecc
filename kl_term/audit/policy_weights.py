r"""What a token's advantage is multiplied by in the policy loss, one token alone.

Of a right loss the derivative by the token's log-prob is, near the sampler, minus the advantage
times the ratio :math:`\rho` or times one, whatever the token's own probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kl_term.audit.one_token import policy_of_token
from kl_term.audit.readings import Reading

#: Log-ratios (nats) of two steps on one side of the sampler, inside every clip that is in use.
_STEPS = (0.01, 0.02)
#: Log-probs of a token that the policy itself draws, and the reference's, which stays.
_LOGPS, _REF_LOGP = (-0.4, -1.5, -3.0), -1.0


@dataclass(frozen=True)
class PolicyWeights:
    """Of one token; None where it cannot be told, or follows no rule."""

    power: float | None = None  #: of the ratio, for both signs and on both sides of the sampler
    #: The largest over the smallest gradient of one advantage, by the probability of the token.
    by_probability: float | None = None
    by_size: float | None = None  #: the gradient of twice an advantage, over that of the advantage
    negative_rises: bool = False  #: a negative advantage makes its token more likely


def policy_weights(reading: Reading) -> PolicyWeights:
    """Measured by single tokens, in a group of answers where a call needs more than one."""
    if reading.coarse or any(reading.foreign.layout.prompted):
        return PolicyWeights()
    fresh = {a: _gradient(reading, _LOGPS, (0.0, 0.0, 0.0), a) for a in (-1.0, 1.0, 2.0)}
    if not all(bool(x.isfinite().all()) for x in fresh.values()) or bool((fresh[1.0] == 0).any()):
        return PolicyWeights()
    at_nothing = _gradient(reading, _LOGPS, (0.0, 0.0, 0.0), 0.0)
    if reading.fewest_of_policy > 1:  # of equal rewards a spread that is divided by is zero
        at_nothing = at_nothing.nan_to_num()
    by_size = float(fresh[2.0][0] / fresh[1.0][0]) if not bool((at_nothing != 0).any()) else None
    if by_size is not None and abs(by_size - 1) < 0.02:
        positive_alone = not bool((fresh[-1.0] != 0).any())
        if reading.fewest_of_policy > 1 or positive_alone:
            by_size = None  # divided by the group's spread, or advantages only select
    return PolicyWeights(
        power=_power(reading, at_nothing[:1]),
        by_probability=_spread([fresh[a] - at_nothing for a in (-1.0, 1.0)]),
        by_size=by_size,
        negative_rises=bool((fresh[-1.0] - at_nothing < 0).all() and (fresh[1.0] < 0).all()),
    )


def _gradient(
    reading: Reading, logps: Sequence[float], log_ratios: Sequence[float], advantage: float
) -> Tensor:
    """[N]: derivative by the log-prob of each token, each in a call of its own."""
    found = []
    for logp, log_ratio in zip(logps, log_ratios, strict=True):
        part = policy_of_token(reading, logp, _REF_LOGP, log_ratio, advantage)
        gradient = part.gradient.flatten()[:1]
        found.append(gradient / -math.expm1(logp) if reading.by_logits else gradient)
    return torch.cat(found)


def _power(reading: Reading, at_nothing: Tensor) -> float | None:
    """k where the gradient goes with the k-th power of the ratio; None where it has no one k."""
    powers = []
    for advantage in (1.0, -1.0):
        for side in (1.0, -1.0):
            steps = [side * step for step in _STEPS]
            near, far = _gradient(reading, _LOGPS[:1] * 2, steps, advantage) - at_nothing
            if bool(near * far > 0):
                powers.append(math.log(float(far / near)) / (steps[1] - steps[0]))
    alike = bool(powers) and max(powers) - min(powers) < 0.1
    return sum(powers) / len(powers) if alike else None


def _spread(gradients: Sequence[Tensor]) -> float | None:
    found = [float(g.abs().max() / g.abs().min()) for g in gradients if bool((g != 0).all())]
    return min(found) if found else None
