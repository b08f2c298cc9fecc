r"""Exact expected gradients at one state, by summing over the whole vocabulary.

A sampled KL loss at one state has per-sample gradient :math:`c(a)\, \nabla \log \pi_\theta(a)`,
where the coefficient :math:`c` is the derivative of the loss by the log-prob of the sampled
token. With a softmax policy over logits :math:`z`, :math:`\nabla_z \log \pi_\theta(a) = e_a -
\pi_\theta`, so expectation and variance over :math:`a \sim \pi_{\mathrm{old}}` are finite sums.
Nothing here is sampled: these are the referees of every claim about gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kl_term.checks import check_same_shape, checked
from kl_term.kl.divergences import log_softmaxes, reverse_kl
from kl_term.kl.names import PLACEMENTS
from kl_term.kl.surrogates import kl_loss, kl_penalty
from kl_term.plain_checks import check_choice
from kl_term.shapes import Logits, LogProbs, Values


class GradientMoments(NamedTuple):
    """Mean and spread of a per-sample gradient by the logits."""

    mean: Tensor  #: [..., V], expected gradient, to be descended
    trace_var: Tensor  #: [...], trace of the covariance of one sample's gradient


@checked
def reverse_kl_gradient(logits: Logits, ref_logits: Logits) -> Logits:
    r"""Closed-form gradient of the reverse KL by the logits.

    .. math:: \nabla_z \mathrm{KL}(\pi_\theta \Vert \pi_{\mathrm{ref}})
        = \mathbb{E}_{a \sim \pi_\theta}[l(a)\, \nabla_z \log \pi_\theta(a)]
        = \pi_\theta \odot \big(l - \mathrm{KL}(\pi_\theta \Vert \pi_{\mathrm{ref}})\big)

    Equation: ``reverse_kl_gradient``
    Source: Liu et al. (2025), appendix A.

    Args:
        logits: [..., V], of the policy.
        ref_logits: [..., V], of the reference.

    Returns:
        [..., V].
    """
    divergence = reverse_kl(logits, ref_logits)
    logp, ref_logp = log_softmaxes(logits, ref_logits)
    policy = logp.exp()
    return torch.where(policy == 0, 0.0, policy * (logp - ref_logp - divergence.unsqueeze(-1)))


@checked
def forward_kl_gradient(logits: Logits, ref_logits: Logits) -> Logits:
    r"""Closed-form gradient of the forward KL by the logits.

    .. math:: \nabla_z \mathrm{KL}(\pi_{\mathrm{ref}} \Vert \pi_\theta)
        = \mathbb{E}_{a \sim \pi_\theta}[(1 - r(a))\, \nabla_z \log \pi_\theta(a)]
        = \pi_\theta - \pi_{\mathrm{ref}}

    Equation: ``forward_kl_gradient``

    Args, Returns: as :func:`reverse_kl_gradient`.
    """
    logp, ref_logp = log_softmaxes(logits, ref_logits)
    return logp.exp() - ref_logp.exp()


@checked
def sample_coefficient(
    logp: LogProbs,
    ref_logp: LogProbs,
    old_logp: LogProbs,
    *,
    estimator: str,
    placement: str = "loss",
    weighting: str = "none",
) -> Values:
    r"""The coefficient of :math:`\nabla \log \pi_\theta(a)` in one sample's gradient.

    .. math:: c(a) = \frac{\partial\, w\, k(l)}{\partial \log \pi_\theta(a)} \;\text{(loss)},
        \qquad c(a) = w\, k(l_{\mathrm{old}}) \;\text{(reward)}

    The loss is differentiated by autograd through :func:`kl_term.kl.surrogates.kl_loss`, the code
    a trainer runs. In the reward the penalty is fixed when the token is sampled, so it holds the
    log-ratio of the *sampling* policy; its weight :math:`w` is the ratio of the policy gradient
    (attached and detached agree there). Where the weight is zero, so is the coefficient; that is
    its limit, but for k3 and k4 detached, where the limit is
    :math:`-\pi_{\mathrm{ref}} / \pi_{\mathrm{old}}`.

    Equation: ``sample_coefficient``

    Args:
        logp, ref_logp, old_logp: [...], log-probs of each token under policy, reference, sampler.
        estimator: a name of :data:`kl_term.kl.estimators.TOKEN_ESTIMATORS`.
        placement: ``loss`` or ``reward``.
        weighting: ``none``, ``attached`` or ``detached``.

    Returns:
        [...], without gradient.
    """
    check_choice("placement", placement, PLACEMENTS)
    with torch.enable_grad():
        leaf = logp.detach().requires_grad_(True)
        if placement == "loss":
            sampled = None if weighting == "none" else old_logp
            loss = kl_loss(
                leaf, ref_logp, old_logp=sampled, estimator=estimator, weighting=weighting
            )
        else:
            penalty = kl_penalty(old_logp, ref_logp, estimator=estimator)
            weight = 1.0 if weighting == "none" else torch.exp(leaf - old_logp).detach()
            loss = weight * penalty * leaf
        (coefficient,) = torch.autograd.grad(loss.sum(), leaf)
    if weighting != "none":
        coefficient = torch.where(torch.exp(logp - old_logp) == 0, 0.0, coefficient)
    undefined = logp.isnan() | ref_logp.isnan() | old_logp.isnan()
    return torch.where(undefined, torch.nan, coefficient)


@checked
def gradient_moments(
    logits: Logits,
    ref_logits: Logits,
    old_logits: Logits | None = None,
    *,
    estimator: str,
    placement: str = "loss",
    weighting: str = "none",
) -> GradientMoments:
    r"""Exact mean and variance of the sampled KL gradient at one state.

    .. math:: \mathbb{E}_{a \sim \pi_{\mathrm{old}}}[c(a)(e_a - \pi_\theta)], \qquad
        \mathbb{E}[c(a)^2 \Vert e_a - \pi_\theta \Vert^2] - \Vert \mathbb{E}[\cdot] \Vert^2

    Equation: ``gradient_moments``
    Sampler: :math:`a \sim \pi_{\mathrm{old}}`; on-policy if ``old_logits`` is left out.

    Args:
        logits, ref_logits, old_logits: [..., V], policy, reference and sampler.
        estimator, placement, weighting: as :func:`sample_coefficient`.

    Returns:
        The mean [..., V], which gradient *descent* follows, and the trace of the covariance [...].
    """
    logp, ref_logp = log_softmaxes(logits, ref_logits)
    if old_logits is None:
        old_logp = logp.detach()
    else:
        check_same_shape("logits", logits, "old_logits", old_logits)
        old_logp = torch.log_softmax(old_logits.to(logp.dtype), dim=-1)
    coefficient = sample_coefficient(
        logp, ref_logp, old_logp, estimator=estimator, placement=placement, weighting=weighting
    )
    policy, sampler = logp.exp(), old_logp.exp()
    coefficient = torch.where(sampler == 0, 0.0, coefficient)  # what is never drawn adds nothing
    weighted = sampler * coefficient
    mean = weighted - policy * weighted.sum(-1, keepdim=True)
    squared_norm = 1 - 2 * policy + policy.square().sum(-1, keepdim=True)  # |e_a - pi|^2
    second_moment = (weighted * coefficient * squared_norm).sum(-1)
    return GradientMoments(mean, second_moment - mean.square().sum(-1))


@checked
def expected_gradient(
    logits: Logits,
    ref_logits: Logits,
    old_logits: Logits | None = None,
    *,
    estimator: str,
    placement: str = "loss",
    weighting: str = "none",
) -> Logits:
    r"""The mean of :func:`gradient_moments`: what a KL term optimises in expectation.

    Args, Returns: as :func:`gradient_moments`; [..., V].
    """
    return gradient_moments(
        logits,
        ref_logits,
        old_logits,
        estimator=estimator,
        placement=placement,
        weighting=weighting,
    ).mean


@checked
def exact_kl_gradient(logits: Logits, ref_logits: Logits, *, direction: str) -> Logits:
    """Gradient of the reverse or forward KL by the logits, by name (see the two closed forms)."""
    gradients = {"reverse": reverse_kl_gradient, "forward": forward_kl_gradient}
    check_choice("direction", direction, gradients)
    return gradients[direction](logits, ref_logits)


@checked
def cosine(gradient: Logits, exact: Logits) -> Tensor:
    """Cosine of two gradients over the last axis; NaN where one of them vanishes."""
    norms = gradient.norm(dim=-1) * exact.norm(dim=-1)
    return torch.where(norms > 0, (gradient * exact).sum(-1) / norms, torch.nan)


@checked
def relative_error(gradient: Logits, exact: Logits) -> Tensor:
    """Norm of the difference over the norm of the exact gradient, over the last axis.

    Where the exact gradient vanishes it is ``inf``, or NaN if the other one vanishes too.
    """
    return (gradient - exact).norm(dim=-1) / exact.norm(dim=-1)
