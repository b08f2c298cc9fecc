r"""GRPO with the KL merged into the advantage, under each reading of its log-ratio.

Merged into :math:`\hat R = A - \beta\, c`, the KL shares importance ratio and clip with the reward.
The formula is printed with :math:`\pi_\theta` in one place and :math:`\pi_{\mathrm{old}}` in
another, and says nothing of whether autograd sees it: three readings, three objectives.
"""

from __future__ import annotations

import torch

from kl_term.checks import as_mask, check_same_shape, checked, pair_of_floats, per_token_advantages
from kl_term.objectives.losses import policy_loss
from kl_term.plain_checks import check_choice, check_not_negative
from kl_term.shapes import AnyFloats, LogProbs, Mask, Values

READINGS = ("old", "detached", "attached")
PENALTIES = ("k1", "k3")


@checked(nan="refused")
def merged_reward(
    logp: LogProbs,
    ref_logp: LogProbs,
    old_logp: LogProbs,
    advantages: AnyFloats,
    mask: Mask,
    *,
    beta: float,
    reading: str,
    penalty: str = "k1",
) -> Values:
    r"""Advantage minus the KL's coefficient, for one of three policies in the log-ratio.

    .. math:: \hat R = A - \beta\, c(l_x), \qquad l_x = \log \pi_x - \log \pi_{\mathrm{ref}},
        \qquad \pi_x \in \{\pi_{\mathrm{old}},\ \mathrm{sg}(\pi_\theta),\ \pi_\theta\}

    with :math:`c(l) = l` (``k1``: k1 in the reward) or :math:`c(l) = 1 - e^{-l}` (``k3``: the k3
    loss moved into the reward).

    Equation: ``merged_reward``
    Source: Liu, Liu and Liu, "Rethinking KL Divergence in RLHF" (March 2025), above equation 39.

    Args:
        logp, ref_logp, old_logp: [..., T], log-probs of the sampled tokens.
        advantages: [...] (one a row) or [..., T]; treated as constant.
        mask: [..., T], True = counted.
        beta: the KL coefficient, at least 0.
        reading: ``old``, ``detached`` or ``attached``, in the order of the formula.
        penalty: ``k1`` or ``k3``.

    Returns:
        [..., T]; 0 where masked; with gradient only if ``attached``.
    """
    check_choice("reading", reading, READINGS)
    check_choice("penalty", penalty, PENALTIES)
    check_not_negative("beta", beta)
    logp, ref_logp = pair_of_floats("logp", logp, "ref_logp", ref_logp)
    check_same_shape("logp", logp, "old_logp", old_logp)
    counted = as_mask("mask", mask, "logp", logp)
    token_advantages = per_token_advantages(advantages, "logp", logp).detach()
    of = {"old": old_logp.detach(), "detached": logp.detach(), "attached": logp}[reading]
    ref_log_ratio = torch.where(counted, of, 0.0) - torch.where(counted, ref_logp.detach(), 0.0)
    coefficient = ref_log_ratio if penalty == "k1" else -torch.expm1(-ref_log_ratio)
    return torch.where(counted, token_advantages, 0.0) - beta * coefficient


@checked(nan="refused")
def merged_loss(
    logp: LogProbs,
    ref_logp: LogProbs,
    old_logp: LogProbs,
    advantages: AnyFloats,
    mask: Mask,
    *,
    beta: float,
    reading: str,
    penalty: str = "k1",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> Values:
    r"""Clipped surrogate of the merged reward, per token.

    .. math:: \ell_t = -\min\big(\rho_t \hat R_t,\ \mathrm{clip}(\rho_t, 1 -
        \epsilon_{\mathrm{low}}, 1 + \epsilon_{\mathrm{high}})\, \hat R_t\big)

    Under ``old`` and ``detached`` it is ``grpo_off_policy`` of :mod:`kl_term.objectives.losses`.
    Under ``attached`` the clip stops the gradient of the ratio only: :math:`\hat R_t` still passes
    :math:`\beta\, w_t \nabla c(l_t)`, at the clipped weight :math:`w_t`.

    Equation: ``merged_loss``
    Source: Liu, Liu and Liu, "Rethinking KL Divergence in RLHF" (March 2025), equation 39.
    Sampler: :math:`y \sim \pi_{\mathrm{old}}`.

    Args:
        logp, ref_logp, old_logp, advantages, mask, beta, reading, penalty: as
            :func:`merged_reward`.
        epsilon_low: how far the ratio may fall below 1, in [0, 1].
        epsilon_high: how far it may rise above 1; ``math.inf`` lifts the bound.

    Returns:
        [..., T], to be minimised; exactly 0 where masked.
    """
    reward = merged_reward(
        logp, ref_logp, old_logp, advantages, mask, beta=beta, reading=reading, penalty=penalty
    )
    output = policy_loss(
        logp,
        old_logp=old_logp,
        advantages=reward,
        mask=mask,
        kind="grpo_off_policy",
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
    )
    bounded = output.weight.clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
    weight = torch.where(output.clipped, bounded, output.weight)
    return output.per_token - weight * (reward - reward.detach())


@checked(nan="refused")
def kl_coefficient_kept(
    logp: LogProbs,
    ref_logp: LogProbs,
    old_logp: LogProbs,
    advantages: AnyFloats,
    mask: Mask,
    *,
    beta: float,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> Values:
    r"""What the clip leaves of the KL's coefficient, for the detached reading.

    .. math:: \rho_t\, l_t \cdot \Big(1 - \mathbb{1}\big[\hat R_t > 0,\ \rho_t > 1 +
        \epsilon_{\mathrm{high}}\big] - \mathbb{1}\big[\hat R_t < 0,\ \rho_t < 1 -
        \epsilon_{\mathrm{low}}\big]\Big), \qquad \hat R_t = A_t - \beta l_t

    A token whose advantage outweighs its KL, :math:`|A_t| > \beta |l_t|`, has its KL switched by
    the *advantage*: once the ratio has followed the advantage past the bound, the KL that would
    pull it back is gone as well.

    Equation: ``kl_coefficient_kept``

    Args: as :func:`merged_loss`.

    Returns:
        [..., T], without gradient; 0 where masked or clipped.
    """
    reward = merged_reward(
        logp, ref_logp, old_logp, advantages, mask, beta=beta, reading="detached"
    )
    output = policy_loss(
        logp.detach(),
        old_logp=old_logp,
        advantages=reward,
        mask=mask,
        kind="grpo_off_policy",
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
    )
    log_ratio = torch.where(as_mask("mask", mask, "logp", logp), logp - ref_logp, 0.0).detach()
    return torch.where(output.clipped, 0.0, output.weight * log_ratio)
