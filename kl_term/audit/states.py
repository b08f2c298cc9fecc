"""Many states at once, for a loss of one token that is a formula of three log-probs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from kl_term.audit.targets import POTENTIALS, Minimised, decided, potential_gradient
from kl_term.kl.scores import expected_score

#: Of ``logp`` with gradient, ``ref_logp`` and ``old_logp``, all [...]: the term of each token.
Formula = Callable[[Tensor, Tensor, Tensor], Tensor]


class States(NamedTuple):
    """Triples of categorical policies, one a row [N, V]."""

    logits: Tensor
    ref_logits: Tensor
    old_logits: Tensor

    def answer_logp(self, logits: Tensor) -> Tensor:
        """[N, V], log-probs of the tokens."""
        return logits.log_softmax(-1)


def coefficient(formula: Formula, logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
    """Derivative of a term by the log-prob of its token, by autograd."""
    return grad(lambda at: formula(at, ref_logp, old_logp).sum())(logp)


def mean_gradient(formula: Formula, at: States) -> Tensor:
    """[N, V]: expected gradient by the logits under the sampler, by summing over the vocabulary."""
    logp, ref_logp, old_logp = (at.answer_logp(x) for x in at)
    return expected_score(
        at.logits, old_logp.exp() * coefficient(formula, logp, ref_logp, old_logp)
    )


def known_gradients(at: States) -> dict[str, Tensor]:
    """[N, V] each: the exact gradients that a term may turn out to have, by name."""
    return {name: potential_gradient(name, at) for name in POTENTIALS}


def descends(gradient: Tensor, known: dict[str, Tensor], *, tolerance: float) -> Minimised:
    """What an expected gradient [N, V] is at every state, with one coefficient for all.

    Args:
        gradient: by the logits.
        known: :func:`known_gradients` of the same states; those to the sampler are left out where
            they are zero, as on fresh samples.
        tolerance: relative error up to which two gradients are the same.
    """
    fresh = bool(known["reverse KL to the sampler"].abs().max() < 1e-12)
    by_state = {name: list(of.unbind(0)) for name, of in known.items()}
    return decided(list(gradient.unbind(0)), by_state, tolerance, fresh=fresh)


def dead_zones_of(
    formula: Formula, *, furthest: float, count: int, reference_is_sampler: bool = False
) -> tuple[float, float]:
    """Log-ratios (nats) below and above which a coefficient is exactly zero on fresh samples.

    NaN where there is no such zone within ``furthest``.
    """
    log_ratio = torch.linspace(-furthest, furthest, count, dtype=torch.float64)
    logp = torch.full_like(log_ratio, -furthest - 1)
    ref_logp = logp - log_ratio
    old_logp = ref_logp if reference_is_sampler else logp
    alive = log_ratio[coefficient(formula, logp, ref_logp, old_logp) != 0]
    low, high = alive.min().item(), alive.max().item()
    return low if low > -furthest else torch.nan, high if high < furthest else torch.nan
