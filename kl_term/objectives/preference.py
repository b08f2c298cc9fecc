r"""Direct preference optimisation: the KL-regularised reward objective solved for its policy.

The maximiser of :math:`\mathbb{E}[R] - \beta\,\mathrm{KL}(\pi \Vert \pi_{\mathrm{ref}})` ties
reward and policy by :math:`R(x, y) = \beta \log \frac{\pi(y|x)}{\pi_{\mathrm{ref}}(y|x)} +
\beta \log Z(x)`. In a comparison of two completions of one prompt :math:`Z` cancels, so a
preference model becomes a loss on log-probs: :math:`\beta` is the KL coefficient, though no KL is
computed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kl_term.checks import check_same_shape, checked, pair_of_floats
from kl_term.plain_checks import check_positive
from kl_term.shapes import LogProbs, Values


@checked
def implicit_reward(logp: LogProbs, ref_logp: LogProbs, *, beta: float = 0.1) -> Values:
    r"""The reward under which a policy is already optimal, up to a constant per prompt.

    .. math:: \hat R(x, y) = \beta \log \frac{\pi_\theta(y|x)}{\pi_{\mathrm{ref}}(y|x)}

    Equation: ``implicit_reward``
    Source: Rafailov et al. (2023), section 4.
    Gradient: :math:`\beta \nabla \log \pi_\theta(y|x)`; the reference is treated as constant.

    Args:
        logp: [...], log-probs of whole completions under the trained policy (nats).
        ref_logp: [...], under the reference.
        beta: the KL coefficient, in reward per nat.

    Returns:
        [...], in the unit of the reward.
    """
    check_positive("beta", beta)
    logp, ref_logp = pair_of_floats("logp", logp, "ref_logp", ref_logp)
    return beta * (logp - ref_logp.detach())


@checked
def dpo_loss(
    logp_w: LogProbs,
    logp_l: LogProbs,
    ref_logp_w: LogProbs,
    ref_logp_l: LogProbs,
    *,
    beta: float = 0.1,
) -> Values:
    r"""Negative log-likelihood of the preferences under the implicit rewards, per pair.

    .. math:: \mathcal{L} = -\log \sigma\big(\hat R(x, y_w) - \hat R(x, y_l)\big)

    Equation: ``dpo_loss``
    Source: Rafailov et al. (2023), equation 7.
    Sampler: a fixed set of pairs, :math:`y_w` preferred to :math:`y_l`; no policy need have
        sampled them.
    Gradient: :func:`dpo_gradient_weight` times
        :math:`\nabla \log \pi_\theta(y_l) - \nabla \log \pi_\theta(y_w)`.

    Args:
        logp_w: [...], log-probs of the preferred completions, summed over tokens (nats).
        logp_l: [...], of the others.
        ref_logp_w: [...], of the preferred completions under the reference; constant.
        ref_logp_l: [...], of the others under the reference; constant.
        beta: the KL coefficient.

    Returns:
        [...], nats per pair; log 2 where policy and reference agree.
    """
    return -functional.logsigmoid(_margin(logp_w, logp_l, ref_logp_w, ref_logp_l, beta))


@checked
def dpo_gradient_weight(
    logp_w: LogProbs,
    logp_l: LogProbs,
    ref_logp_w: LogProbs,
    ref_logp_l: LogProbs,
    *,
    beta: float = 0.1,
) -> Values:
    r"""How hard the loss pushes a pair apart: the more, the more wrongly it is ranked.

    .. math:: w = \beta\, \sigma\big(\hat R(x, y_l) - \hat R(x, y_w)\big)

    Equation: ``dpo_gradient_weight``
    Source: Rafailov et al. (2023), section 4, the gradient of the loss.

    Args: as :func:`dpo_loss`.

    Returns:
        [...], between 0 and ``beta``, without gradient.
    """
    margin = _margin(logp_w, logp_l, ref_logp_w, ref_logp_l, beta)
    return beta * torch.sigmoid(-margin.detach())


def _margin(
    logp_w: Tensor, logp_l: Tensor, ref_logp_w: Tensor, ref_logp_l: Tensor, beta: float
) -> Tensor:
    """Implicit reward of the preferred completion minus that of the other."""
    check_same_shape("logp_w", logp_w, "logp_l", logp_l)
    check_same_shape("logp_w", logp_w, "ref_logp_w", ref_logp_w)
    check_same_shape("logp_w", logp_w, "ref_logp_l", ref_logp_l)
    preferred = implicit_reward(logp_w, ref_logp_w, beta=beta)
    return preferred - implicit_reward(logp_l, ref_logp_l, beta=beta)
