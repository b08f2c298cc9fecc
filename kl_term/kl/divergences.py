"""Exact divergences between two categorical policies, over the last axis (nats).

Directions are named from the trained policy's side: *reverse* KL averages under the policy,
*forward* KL averages under the reference. Outcomes that a distribution forbids (logit ``-inf``)
contribute their limit, ``0 log 0 = 0``, to value and gradient. A NaN or a positive infinity among
the logits gives NaN: it must stay visible.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kl_term.checks import at_least_float32, check_float, checked, pair_of_floats
from kl_term.plain_checks import check_positive
from kl_term.shapes import Logits, Values

#: Where :func:`capped_forward_kl` and :func:`kl_term.kl.estimators.k3_clip` cap the ratio.
MAX_RATIO = 10.0


@checked
def reverse_kl(logits: Logits, ref_logits: Logits) -> Values:
    r"""Reverse KL of a policy from its reference: the KL of the RLHF objective.

    .. math:: \mathrm{KL}(\pi_\theta \Vert \pi_{\mathrm{ref}})
        = \sum_a \pi_\theta(a) \log \frac{\pi_\theta(a)}{\pi_{\mathrm{ref}}(a)}

    Equation: ``reverse_kl``
    Gradient: ``reverse_kl_gradient`` in :mod:`kl_term.kl.enumeration`.

    Args:
        logits: [..., V], unnormalised log-probs of the policy.
        ref_logits: [..., V], of the reference.

    Returns:
        [...], in nats; ``inf`` where the policy allows what the reference forbids.
    """
    logp, ref_logp = log_softmaxes(logits, ref_logits)
    return _mean_log_ratio(logp, ref_logp)


@checked
def forward_kl(logits: Logits, ref_logits: Logits) -> Values:
    r"""Forward KL: the mean is taken under the reference.

    .. math:: \mathrm{KL}(\pi_{\mathrm{ref}} \Vert \pi_\theta)
        = \sum_a \pi_{\mathrm{ref}}(a) \log \frac{\pi_{\mathrm{ref}}(a)}{\pi_\theta(a)}

    Equation: ``forward_kl``
    Gradient: ``forward_kl_gradient`` in :mod:`kl_term.kl.enumeration`.

    Args, Returns: as :func:`reverse_kl`.
    """
    logp, ref_logp = log_softmaxes(logits, ref_logits)
    return _mean_log_ratio(ref_logp, logp)


@checked
def chi_square(logits: Logits, ref_logits: Logits) -> Values:
    r"""Chi-square divergence of the reference from the policy: the variance of :math:`r`.

    .. math:: \chi^2(\pi_{\mathrm{ref}} \Vert \pi_\theta)
        = \sum_a \frac{\pi_{\mathrm{ref}}(a)^2}{\pi_\theta(a)} - 1
        = \mathrm{Var}_{\pi_\theta}[r], \qquad r = \pi_{\mathrm{ref}} / \pi_\theta

    Equation: ``chi_square``

    Args: as :func:`reverse_kl`.

    Returns:
        [...], dimensionless; ``inf`` where the reference allows what the policy forbids.
    """
    logp, ref_logp = log_softmaxes(logits, ref_logits)
    both_forbid = (logp == -torch.inf) & (ref_logp == -torch.inf)
    logp, ref_logp = (torch.where(both_forbid, 0.0, x) for x in (logp, ref_logp))
    # sqrt(pi) |r - 1|: its squares have no first order that must cancel, and overflow with the sum.
    larger = torch.exp(torch.maximum(0.5 * logp, ref_logp - 0.5 * logp))
    return (larger * torch.expm1(-(ref_logp - logp).abs())).square().sum(-1)


@checked
def entropy(logits: Logits) -> Values:
    r"""Shannon entropy of the policy.

    .. math:: H(\pi_\theta) = -\sum_a \pi_\theta(a) \log \pi_\theta(a)

    Equation: ``entropy``

    Args:
        logits: [..., V], unnormalised log-probs.

    Returns:
        [...], in nats.
    """
    check_float("logits", logits)
    logp = torch.log_softmax(at_least_float32(logits), dim=-1)
    allowed = logp != -torch.inf
    return -_sum_where(allowed, logp, torch.where(allowed, logp, 0.0))


@checked
def half_squared_distance(logits: Logits, ref_logits: Logits) -> Values:
    r"""Half the squared Euclidean distance of two policies: what MiniMax-01's surrogate descends.

    .. math:: \tfrac12 \sum_a \big(\pi_\theta(a) - \pi_{\mathrm{ref}}(a)\big)^2

    Equation: ``half_squared_distance``

    Args:
        logits, ref_logits: [..., V].

    Returns:
        [...], dimensionless.
    """
    logits, ref_logits = pair_of_floats("logits", logits, "ref_logits", ref_logits)
    return 0.5 * (logits.softmax(-1) - ref_logits.softmax(-1)).square().sum(-1)


@checked
def capped_forward_kl(logits: Logits, ref_logits: Logits, max_ratio: float = MAX_RATIO) -> Values:
    r"""The forward KL of which no token can cost more than a cap: what clipped k3 descends.

    .. math:: \sum_a \pi_{\mathrm{ref}}(a) \log \frac{\pi_{\mathrm{ref}}(a)}
        {\max\big(\pi_\theta(a),\, \pi_{\mathrm{ref}}(a) / r_{\max}\big)}

    A token below :math:`\pi_{\mathrm{ref}} / r_{\max}` is past caring: losing the rest of it is
    free, and giving its probability to another token is a gain.

    Equation: ``capped_forward_kl``

    Args:
        logits, ref_logits: [..., V].
        max_ratio: the cap :math:`r_{\max}` of :func:`kl_term.kl.estimators.k3_clip`.

    Returns:
        [...], nats.
    """
    check_positive("max_ratio", max_ratio)
    logp, ref_logp = log_softmaxes(logits, ref_logits)
    allowed = ref_logp != -torch.inf
    log_ratio = _difference(ref_logp, logp, allowed)
    return _sum_where(allowed, ref_logp, log_ratio.clamp(max=math.log(max_ratio)))


@checked
def log_softmaxes(logits: Logits, ref_logits: Logits) -> tuple[Tensor, Tensor]:
    """Log-probs of a policy and its reference, in a common dtype of at least float32.

    Raises:
        ValueError: if there is no vocabulary axis.
    """
    logits, ref_logits = pair_of_floats("logits", logits, "ref_logits", ref_logits)
    if logits.ndim == 0:
        raise ValueError("logits needs a vocabulary axis: shape [..., V], got a scalar")
    return torch.log_softmax(logits, dim=-1), torch.log_softmax(ref_logits, dim=-1)


def _mean_log_ratio(of_logp: Tensor, from_logp: Tensor) -> Tensor:
    allowed = of_logp != -torch.inf
    return _sum_where(allowed, of_logp, _difference(of_logp, from_logp, allowed))


def _difference(left: Tensor, right: Tensor, allowed: Tensor) -> Tensor:
    """``left - right`` where allowed, else 0; masks the inputs so that no NaN gradient leaks."""
    return torch.where(allowed, left, 0.0) - torch.where(allowed, right, 0.0)


def _sum_where(allowed: Tensor, weight_logp: Tensor, values: Tensor) -> Tensor:
    weights = torch.exp(torch.where(allowed, weight_logp, 0.0))
    return torch.where(allowed, weights * values, 0.0).sum(dim=-1)
