r"""Single-sample estimators of the reverse KL, per token (nats).

Every estimator is a function of one number, the *reference log-ratio* of the sampled token,

.. math:: l = \log \pi_\theta(a) - \log \pi_{\mathrm{ref}}(a), \qquad
    r = e^{-l} = \pi_{\mathrm{ref}}(a) / \pi_\theta(a),

with :math:`a \sim \pi_\theta`. These are values, differentiable in both arguments and nothing
more: whether one is a sensible *loss* or *penalty* is the subject of
:mod:`kl_term.kl.surrogates`. Nothing is clamped unless the name says so, so ``k3`` overflows to
``inf`` where :math:`r` does.

:data:`TOKEN_ESTIMATORS` says of each what the rest of the package needs to know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from kl_term.checks import checked, pair_of_floats
from kl_term.kl.divergences import (
    MAX_RATIO,
    capped_forward_kl,
    forward_kl,
    half_squared_distance,
    reverse_kl,
)
from kl_term.kl.names import TOKEN_NAMES, VALUES, VOCABULARY_NAMES, Estimator
from kl_term.plain_checks import check_choice, check_positive
from kl_term.shapes import LogProbs, Values


@checked
def k1(logp: LogProbs, ref_logp: LogProbs) -> Values:
    r"""The log-ratio itself.

    .. math:: k_1 = l = -\log r

    Equation: ``k1``
    Source: Schulman (2020).
    Sampler: :math:`a \sim \pi_\theta`.
    Estimates: the reverse KL, unbiased; negative wherever the reference is likelier.
    Gradient: :math:`1 \cdot \nabla \log \pi_\theta`, zero in expectation.

    Args:
        logp: [...], log-probs of the sampled tokens under the policy.
        ref_logp: [...], under the reference.

    Returns:
        [...], nats.
    """
    return _ref_log_ratio(logp, ref_logp)


def _slope_of_k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    ref_log_ratio = logp - ref_logp
    return torch.where(ref_log_ratio.isnan(), torch.nan, torch.ones_like(ref_log_ratio))


@checked
def k2(logp: LogProbs, ref_logp: LogProbs) -> Values:
    r"""Half the squared log-ratio.

    .. math:: k_2 = \tfrac12 l^2 = \tfrac12 (\log r)^2

    Equation: ``k2``
    Source: Schulman (2020).
    Sampler: :math:`a \sim \pi_\theta`.
    Estimates: the reverse KL with a bias of third order in the log-ratio.
    Gradient: :math:`l\, \nabla \log \pi_\theta`, on-policy the gradient of the reverse KL.

    Args, Returns: as :func:`k1`; never negative.
    """
    return 0.5 * _ref_log_ratio(logp, ref_logp).square()


def _slope_of_k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return logp - ref_logp


@checked
def k3(logp: LogProbs, ref_logp: LogProbs) -> Values:
    r"""The log-ratio plus the control variate :math:`r - 1`: the KL term of the GRPO paper.

    .. math:: k_3 = r - 1 - \log r = (e^{-l} - 1) + l

    Computed with ``expm1``: the naive form loses every digit near :math:`l = 0` and goes
    negative in half precision.

    Equation: ``k3``
    Source: Schulman (2020); DeepSeekMath (2024), eq. 4.
    Sampler: :math:`a \sim \pi_\theta`.
    Estimates: the reverse KL, unbiased wherever the policy covers the reference.
    Gradient: :math:`(1 - r)\, \nabla \log \pi_\theta`, on-policy the gradient of the *forward* KL.

    Args, Returns: as :func:`k1`; never negative, ``inf`` where :math:`r` overflows.
    """
    ref_log_ratio = _ref_log_ratio(logp, ref_logp)
    return torch.expm1(-ref_log_ratio) + ref_log_ratio


def _slope_of_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return -torch.expm1(-(logp - ref_logp))


@checked
def k3_clip(logp: LogProbs, ref_logp: LogProbs, max_ratio: float = MAX_RATIO) -> Values:
    r"""k3 with its ratio capped from above.

    .. math:: k_{3,\mathrm{clip}} = \min(r, r_{\max}) - 1 - \log r

    Only the exponential is capped, the logarithm is not: above the cap the value *falls* as the
    reference becomes likelier, and is negative from :math:`\log r > r_{\max} - 1` on.

    Equation: ``k3_clip``
    Source: Liu et al. (2025), appendix D.
    Sampler: :math:`a \sim \pi_\theta`.
    Estimates: the reverse KL minus :math:`\mathbb{E}[(r - r_{\max})_+]`: biased low.
    Gradient: :math:`(1 - r)\, \nabla \log \pi_\theta` below the cap, :math:`+1 \cdot \nabla \log
        \pi_\theta` above it, where it pushes the policy *away* from the reference.

    Args:
        logp: [...], log-probs of the sampled tokens under the policy.
        ref_logp: [...], under the reference.
        max_ratio: the cap on :math:`r`, positive.

    Returns:
        [...], nats.
    """
    check_positive("max_ratio", max_ratio)
    ref_log_ratio = _ref_log_ratio(logp, ref_logp)
    # Bounded twice: an exponential that overflows would have no gradient but NaN under the cap.
    bounded = (-ref_log_ratio).clamp(max=math.log(max_ratio) + 1.0)
    return torch.expm1(bounded).clamp(max=max_ratio - 1.0) + ref_log_ratio


def _slope_of_k3_clip(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """At the cap itself, that of the side below, as autograd has it."""
    one_minus_ratio = _slope_of_k3(logp, ref_logp)
    return torch.where(one_minus_ratio < 1.0 - MAX_RATIO, 1.0, one_minus_ratio)


@checked
def k4(logp: LogProbs, ref_logp: LogProbs) -> Values:
    r"""k3 where k1 is negative, else the smaller of k1 and k3; which is k3 everywhere.

    .. math:: k_4 = \begin{cases} k_3 & k_1 < 0 \\ \min(k_1, k_3) & k_1 \ge 0 \end{cases}
        \;=\; k_3

    For :math:`k_1 \ge 0` we have :math:`r \le 1`, so :math:`k_3 = k_1 + (r - 1) \le k_1`. The tie
    at :math:`l = 0` is given to k3: ``torch.minimum`` would split its gradient between the two and
    leave half of k1's on every token while the policy still equals its reference.

    Equation: ``k4``
    Source: Liu et al. (2025), appendix D.
    Sampler, Estimates, Gradient, Args, Returns: as :func:`k3`.
    """
    value_k1, value_k3 = k1(logp, ref_logp), k3(logp, ref_logp)
    return torch.where((value_k1 < 0) | (value_k3 <= value_k1), value_k3, value_k1)


def _ref_log_ratio(logp: Tensor, ref_logp: Tensor) -> Tensor:
    logp, ref_logp = pair_of_floats("logp", logp, "ref_logp", ref_logp)
    return logp - ref_logp


def _slope_of_minimax01(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return torch.exp(logp) - torch.exp(ref_logp)


def _zero(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Of no term, with a gradient; NaN where a logit is NaN or ``inf``, as elsewhere."""
    logits, ref_logits = pair_of_floats("logits", logits, "ref_logits", ref_logits)
    logits, ref_logits = (torch.where(x == -torch.inf, 0.0, x) for x in (logits, ref_logits))
    return (logits * 0.0 + ref_logits * 0.0).sum(-1)


class TokenEstimator(NamedTuple):
    """What the package knows of an estimator that reads the sampled token alone."""

    #: Of ``logp`` and ``ref_logp``; None where it has a gradient but no value.
    value: Callable[[Tensor, Tensor], Tensor] | None
    #: Of the same: what multiplies the gradient of ``logp`` when the estimator is a loss.
    slope: Callable[[Tensor, Tensor], Tensor]
    #: Of ``logits`` and ``ref_logits``: what it descends on-policy as a loss; None where that has
    #: no closed form.
    potential: Callable[[Tensor, Tensor], Tensor] | None


#: The one table of the estimators of sampled tokens, by their names in :mod:`kl_term.kl.names`.
TOKEN_ESTIMATORS: dict[str, TokenEstimator] = {
    "k1": TokenEstimator(k1, _slope_of_k1, _zero),
    "k2": TokenEstimator(k2, _slope_of_k2, reverse_kl),
    "k3": TokenEstimator(k3, _slope_of_k3, forward_kl),
    "k3_clip": TokenEstimator(k3_clip, _slope_of_k3_clip, capped_forward_kl),
    "k4": TokenEstimator(k4, _slope_of_k3, forward_kl),
    "minimax01": TokenEstimator(None, _slope_of_minimax01, half_squared_distance),
}
#: The estimators that sum over the vocabulary at each visited state, of ``logits`` and
#: ``ref_logits``.
VOCABULARY_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exact": reverse_kl,
    "forward": forward_kl,
}

#: The values of the estimators that have one.
ESTIMATORS = {name: of.value for name, of in TOKEN_ESTIMATORS.items() if of.value is not None}
#: What they descend on-policy as a loss, where that has a closed form.
POTENTIALS = {
    name: of.potential for name, of in TOKEN_ESTIMATORS.items() if of.potential is not None
}


def _check_names(named: tuple[str, ...], known: Iterable[str]) -> None:
    """Refuse a name of :mod:`kl_term.kl.names` without an estimator, and the other way round."""
    for name in named:
        check_choice("each estimator in kl_term/kl/names.py", name, known)
    for name in known:
        check_choice("each estimator in kl_term/kl/estimators.py", name, named)


_check_names(VALUES, ESTIMATORS)
_check_names(TOKEN_NAMES, TOKEN_ESTIMATORS)
_check_names(VOCABULARY_NAMES, VOCABULARY_ESTIMATORS)
_check_names(get_args(Estimator), ("none", *TOKEN_NAMES, *VOCABULARY_NAMES, "cross_entropy"))
