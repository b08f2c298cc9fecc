r"""Exact mean and variance of the sampled estimators at one state, and their best control variate.

k3 is k1 plus a *control variate*, a quantity of known mean: :math:`r - 1` has mean zero under the
policy. Whether adding it helps is decided by two divergences, :math:`\chi^2` and the Jeffreys
divergence :math:`J`, and so is the weight at which it helps most. Everything here is a finite sum
over the vocabulary; nothing is sampled. Tokens that the policy forbids (logit ``-inf``) are never
sampled: the means and variances leave them out, the divergences are then not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_term.checks import check_same_shape, checked
from kl_term.kl.divergences import log_softmaxes
from kl_term.kl.estimators import ESTIMATORS
from kl_term.shapes import Logits, Values


@checked
def jeffreys_divergence(logits: Logits, ref_logits: Logits) -> Values:
    r"""Jeffreys divergence, reverse plus forward KL: how :math:`r` and :math:`\log r` covary.

    .. math:: J = \mathrm{KL}(\pi_\theta \Vert \pi_{\mathrm{ref}})
        + \mathrm{KL}(\pi_{\mathrm{ref}} \Vert \pi_\theta)
        = \sum_a (\pi_\theta - \pi_{\mathrm{ref}}) \log \frac{\pi_\theta}{\pi_{\mathrm{ref}}}
        = \mathrm{Cov}_{\pi_\theta}[r, \log r] \ge 0

    Summed in the second form, whose terms are never negative, so nothing cancels near
    :math:`\pi_\theta = \pi_{\mathrm{ref}}`.

    Equation: ``jeffreys_divergence``

    Args:
        logits: [..., V], unnormalised log-probs of the policy.
        ref_logits: [..., V], of the reference.

    Returns:
        [...], nats; ``inf`` where one allows what the other forbids.
    """
    logp, ref_logp = log_softmaxes(logits, ref_logits)
    gap = torch.where(_both_forbid(logp, ref_logp), 0.0, (logp - ref_logp).abs())
    return (torch.maximum(logp, ref_logp).exp() * -torch.expm1(-gap) * gap).sum(-1)


@checked
def variance_gap(logits: Logits, ref_logits: Logits) -> Values:
    r"""How much more the control variate costs than it saves; k3 beats k1 where this is negative.

    .. math:: \mathrm{Var}[k_3] - \mathrm{Var}[k_1]
        = \chi^2(\pi_{\mathrm{ref}} \Vert \pi_\theta) - 2 J(\pi_\theta, \pi_{\mathrm{ref}})

    Equation: ``variance_gap``
    Sampler: :math:`a \sim \pi_\theta`.

    Args: as :func:`jeffreys_divergence`.

    Returns:
        [...], nats squared; in the limit ``inf`` where the policy forbids what the reference
        allows, ``-inf`` the other way round, where both variances are infinite; NaN with both.
    """
    policy, log_r = _policy_and_log_r(logits, ref_logits)
    excess = torch.expm1(log_r)
    terms = policy * excess * (excess - 2 * log_r)
    return torch.where(log_r == torch.inf, torch.inf, terms).sum(-1)


@checked
def optimal_control_weight(logits: Logits, ref_logits: Logits) -> Values:
    r"""The weight of :math:`r - 1` that minimises the variance of :math:`k_1 + \lambda (r - 1)`.

    .. math:: \lambda^\ast = -\frac{\mathrm{Cov}[k_1, r - 1]}{\mathrm{Var}[r]}
        = \frac{J(\pi_\theta, \pi_{\mathrm{ref}})}{\chi^2(\pi_{\mathrm{ref}} \Vert \pi_\theta)}

    k1 takes :math:`\lambda = 0` and k3 takes :math:`\lambda = 1`, the limit of the optimum as the
    policy approaches its reference.

    Equation: ``optimal_control_weight``
    Source: Schulman (2020) poses the problem.
    Sampler: :math:`a \sim \pi_\theta`.

    Args: as :func:`jeffreys_divergence`.

    Returns:
        [...], dimensionless, positive; 1 where the two policies are equal, not finite where one
        allows what the other forbids.
    """
    policy, log_r = _policy_and_log_r(logits, ref_logits)
    excess = torch.expm1(log_r)
    chi_square = (policy * excess.square()).sum(-1)
    jeffreys = (policy * excess * log_r).sum(-1)
    equal = chi_square == 0
    return torch.where(equal, 1.0, jeffreys / torch.where(equal, 1.0, chi_square))


@checked
def estimator_means(
    logits: Logits, ref_logits: Logits, old_logits: Logits | None = None
) -> dict[str, Values]:
    r"""Exact mean of every estimator under the policy that sampled.

    .. math:: \mathbb{E}_{a \sim \pi_{\mathrm{old}}}\big[k(l(a))\big]
        = \sum_a \pi_{\mathrm{old}}(a)\, k\big(l(a)\big), \qquad
        l = \log \pi_\theta - \log \pi_{\mathrm{ref}}

    Equation: ``estimator_means``
    Sampler: :math:`a \sim \pi_{\mathrm{old}}`; the policy itself if ``old_logits`` is left out.

    Args:
        logits, ref_logits, old_logits: [..., V], policy, reference and sampler.

    Returns:
        ``{"k1": [...], "k2": ..., "k3": ..., "k3_clip": ..., "k4": ...}``, nats.
    """
    logp, ref_logp = log_softmaxes(logits, ref_logits)
    sampler = _sampler(logp, old_logits).exp()
    pair = _drawn(sampler, logp, ref_logp)
    return {name: _mean(sampler, k(*pair)) for name, k in ESTIMATORS.items()}


@checked
def estimator_variances(
    logits: Logits, ref_logits: Logits, old_logits: Logits | None = None
) -> dict[str, Values]:
    r"""Exact variance of one sample of every estimator, and of the best control variate.

    .. math:: \mathrm{Var}[k_1 + \lambda (r - 1)]
        = \mathrm{Var}[k_1] - 2 \lambda J + \lambda^2 \chi^2, \qquad
        \mathrm{Var}[k_{\lambda^\ast}] = \mathrm{Var}[k_1] - J^2 / \chi^2

    Equation: ``estimator_variances``
    Sampler: as :func:`estimator_means`.

    Args: as :func:`estimator_means`.

    Returns:
        The keys of :func:`estimator_means` and, on-policy, ``optimal``: :math:`k_1 + \lambda^\ast
        (r - 1)` at the weight of :func:`optimal_control_weight`. Nats squared.
    """
    logp, ref_logp = log_softmaxes(logits, ref_logits)
    sampler = _sampler(logp, old_logits).exp()
    logp, ref_logp = _drawn(sampler, logp, ref_logp)
    samples = {name: k(logp, ref_logp) for name, k in ESTIMATORS.items()}
    if old_logits is None:
        weight = optimal_control_weight(logits, ref_logits).unsqueeze(-1)
        samples["optimal"] = samples["k1"] + weight * torch.expm1(ref_logp - logp)
    return {name: _variance(sampler, values) for name, values in samples.items()}


def _variance(weights: Tensor, values: Tensor) -> Tensor:
    return _mean(weights, (values - _mean(weights, values).unsqueeze(-1)).square())


def _mean(weights: Tensor, values: Tensor) -> Tensor:
    """Weighted sum over the tokens that can be sampled: the others do not exist for a sampler."""
    return torch.where(weights == 0, 0.0, weights * values).sum(-1)


def _drawn(sampler: Tensor, *logps: Tensor) -> tuple[Tensor, ...]:
    """Log-probs, zero where nothing is drawn: an infinite one has no gradient but NaN."""
    return tuple(torch.where(sampler == 0, 0.0, logp) for logp in logps)


def _sampler(logp: Tensor, old_logits: Tensor | None) -> Tensor:
    if old_logits is None:
        return logp
    check_same_shape("logits", logp, "old_logits", old_logits)
    return torch.log_softmax(old_logits.to(logp.dtype), dim=-1)


def _policy_and_log_r(logits: Tensor, ref_logits: Tensor) -> tuple[Tensor, Tensor]:
    logp, ref_logp = log_softmaxes(logits, ref_logits)
    log_r = torch.where(_both_forbid(logp, ref_logp), 0.0, ref_logp - logp)
    return logp.exp(), log_r


def _both_forbid(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return (logp == -torch.inf) & (ref_logp == -torch.inf)
