r"""Policy losses of the GRPO family, to be minimised.

One function per kind, each from token-level inputs to token-level terms; :func:`policy_loss`
checks, masks and aggregates. The kinds differ in one thing: what weighs
:math:`\nabla \log \pi_\theta` beside the advantage, and where that weight is cut. With
:math:`\rho_t = \pi_\theta(a_t) / \pi_{\mathrm{old}}(a_t)` the importance ratio, everything is
clipped to :math:`[1 - \epsilon_{\mathrm{low}}, 1 + \epsilon_{\mathrm{high}}]`. The KL term is
separate: :func:`kl_term.kl.surrogates.kl_loss` added to the per-token terms, or
:func:`kl_term.objectives.credit.fold_kl` applied to the advantages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import unwrap
from typing import NamedTuple

import torch
from torch import Tensor

from kl_term.checks import as_mask, checked, pair_of_floats, per_token_advantages
from kl_term.kl.importance import no_overflow
from kl_term.objectives.aggregation import MODES, aggregate, packing_of
from kl_term.plain_checks import check_choice, check_fraction
from kl_term.shapes import AnyFloats, LogProbs, Mask, Tokens, Values


class LossOutput(NamedTuple):
    """What :func:`policy_loss` returns. Only ``loss`` and ``per_token`` carry gradient."""

    loss: Tensor  #: scalar, to be minimised
    per_token: Tensor  #: [..., T], the terms that were aggregated; 0 where masked
    weight: Tensor  #: [..., T], importance weight before the clip; 0 where masked
    #: [..., T] bool, where the clip changes the gradient; for ``cispo`` where it changes the
    #: weight, which at an advantage of zero leaves the gradient, zero, as it is
    clipped: Tensor
    clip_fraction: Tensor  #: scalar, clipped tokens over counted tokens


class ClipRange(NamedTuple):
    """Bounds of the importance weight."""

    low: float
    high: float


class TokenTerms(NamedTuple):
    """What a kind computes, all [..., T]: see :class:`LossOutput`."""

    per_token: Tensor
    weight: Tensor
    clipped: Tensor


@checked
def policy_loss(
    logp: LogProbs,
    *,
    old_logp: LogProbs,
    advantages: AnyFloats,
    mask: Mask,
    kind: str = "grpo",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    aggregation: str = "seq_mean_token_mean",
    sequence_ids: Tokens | None = None,
    sequences: int | None = None,
    width: int | None = None,
) -> LossOutput:
    r"""Loss of a kind, aggregated over the counted tokens.

    .. math:: \mathcal{L} = \sum_{i,t} w_{i,t}\, \ell_{i,t}

    with :math:`\ell` from the function named by ``kind`` and the weights :math:`w` from the one
    named by ``aggregation``. Dr. GRPO is no kind of its own: it is ``kind="grpo"`` with
    ``aggregation="seq_mean_token_sum_norm"`` and advantages from
    :func:`kl_term.objectives.advantages.group_centre`.

    Equation: ``policy_loss``
    Sampler: :math:`y \sim \pi_{\mathrm{old}}`.

    Args:
        logp: [..., T], log-probs of the sampled tokens under the trained policy, with gradient.
        old_logp: [..., T], under the policy that *sampled*; treated as constant.
        advantages: [...] (one a row) or [..., T] (one a token); treated as constant.
        mask: [..., T], True = counted. Masked positions, whatever the inputs hold there, give
            exactly zero value and gradient.
        kind: a name in :data:`KINDS`.
        epsilon_low: how far the weight may fall below 1, in [0, 1].
        epsilon_high: how far it may rise above 1, at least 0.
        aggregation: a name in :data:`kl_term.objectives.aggregation.MODES`.
        sequence_ids, sequences, width: of packed rows, as in
            :func:`kl_term.objectives.aggregation.aggregate`; advantages are then [S], one a
            sequence number, or [..., T].

    Returns:
        A :class:`LossOutput`, in the unit of the advantages.
    """
    check_choice("kind", kind, KINDS)
    check_choice("aggregation", aggregation, MODES)
    if packing := packing_of(sequence_ids, aggregation, sequences, width):
        padded = policy_loss(
            packing.pad(logp),
            old_logp=packing.pad(old_logp),
            advantages=packing.pad_advantages(advantages),
            mask=packing.counted(mask),
            kind=kind,
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
            aggregation=aggregation,
        )
        by_token = {n: packing.pack(getattr(padded, n)) for n in ("per_token", "weight", "clipped")}
        return padded._replace(**by_token)
    clip = _clip_range(epsilon_low, epsilon_high)
    logp, old_logp = pair_of_floats("logp", logp, "old_logp", old_logp)
    token_advantages = per_token_advantages(advantages, "logp", logp)
    counted = as_mask("mask", mask, "logp", logp)
    terms = KINDS[kind](
        torch.where(counted, logp, 0.0),
        torch.where(counted, no_overflow(old_logp.detach()), 0.0),
        torch.where(counted, token_advantages.detach(), 0.0),
        counted,
        clip,
    )
    per_token = torch.where(counted, terms.per_token, 0.0)
    clipped = terms.clipped & counted
    return LossOutput(
        loss=aggregate(per_token, counted, aggregation),
        per_token=per_token,
        weight=torch.where(counted, terms.weight.detach(), 0.0),
        clipped=clipped,
        clip_fraction=aggregate(clipped.to(per_token.dtype), counted, "token_mean"),
    )


@checked
def grpo(
    logp: LogProbs, old_logp: LogProbs, advantages: Values, counted: Mask, clip: ClipRange
) -> TokenTerms:
    r"""Clipped surrogate with one importance ratio a token.

    .. math:: \ell_t = -\min\big(\rho_t A_t,\
        \mathrm{clip}(\rho_t, 1 - \epsilon_{\mathrm{low}}, 1 + \epsilon_{\mathrm{high}})
        A_t\big), \qquad \rho_t = \frac{\pi_\theta(a_t)}{\pi_{\mathrm{old}}(a_t)}

    Equation: ``grpo``
    Source: Shao et al. (2024), DeepSeekMath, without its KL term; Schulman et al. (2017).
    Gradient: :math:`-\rho_t A_t \nabla \log \pi_\theta(a_t)`, and zero where the ratio has already
        moved past its bound in the direction that the advantage asks for.

    Args:
        logp: [..., T], with gradient, 0 where masked.
        old_logp: [..., T], without gradient, 0 where masked.
        advantages: [..., T], without gradient, 0 where masked.
        counted: [..., T], bool.
        clip: the bounds.

    Returns:
        :class:`TokenTerms`.
    """
    return _clipped_surrogate(logp - old_logp, advantages, clip)


@checked
def gspo(
    logp: LogProbs, old_logp: LogProbs, advantages: Values, counted: Mask, clip: ClipRange
) -> TokenTerms:
    r"""Clipped surrogate with one length-normalised ratio a sequence, in its token form.

    .. math:: \ell_t = -\min\big(\bar\rho_t A_t,\
        \mathrm{clip}(\bar\rho_t, 1 - \epsilon_{\mathrm{low}}, 1 + \epsilon_{\mathrm{high}})
        A_t\big), \qquad
        \bar\rho_t = \mathrm{sg}(\bar\rho)\, \frac{\pi_\theta(a_t)}{\mathrm{sg}(\pi_\theta(a_t))},
        \qquad \bar\rho = \Big(\frac{\pi_\theta(y)}{\pi_{\mathrm{old}}(y)}\Big)^{1/|y|}

    With one advantage a row and ``seq_mean_token_mean``, value and gradient are those of the
    sequence form; the token form also takes advantages that vary along the row.

    Equation: ``gspo``
    Source: Zheng et al. (2025), GSPO and GSPO-token.
    Gradient: :math:`-\bar\rho A_t \nabla \log \pi_\theta(a_t)`, zero where clipped.

    Args, Returns: as :func:`grpo`.
    """
    mean_log_ratio = _row_sum(logp - old_logp) / _row_sum(counted).clamp(min=1)
    change = torch.where(logp.isneginf(), 0.0, logp - logp.detach())  # of value 0
    log_weight = mean_log_ratio.detach() + change
    return _clipped_surrogate(log_weight, advantages, clip)


@checked
def sequence(
    logp: LogProbs, old_logp: LogProbs, advantages: Values, counted: Mask, clip: ClipRange
) -> TokenTerms:
    r"""Clipped surrogate with the importance ratio of the whole sequence.

    .. math:: \ell_t = -\min\big(\rho A_t,\
        \mathrm{clip}(\rho, 1 - \epsilon_{\mathrm{low}}, 1 + \epsilon_{\mathrm{high}}) A_t\big),
        \qquad \rho = \frac{\pi_\theta(y)}{\pi_{\mathrm{old}}(y)} = \prod_t \rho_t

    With one advantage a row the term is the same for each of its tokens, so
    ``seq_mean_token_mean`` gives the mean over sequences exactly, gradient included;
    ``token_mean`` weighs sequences by their length. The ratio is the unbiased one if the sampler
    allows what the policy allows, and its variance in general grows exponentially with length.

    Equation: ``sequence``
    Source: Guo et al. (2025), DeepSeek-R1, equation 1, without its KL term.
    Gradient: :math:`-\rho A_t \sum_s \nabla \log \pi_\theta(a_s)`, zero where clipped.

    Args, Returns: as :func:`grpo`.
    """
    return _clipped_surrogate(_row_sum(logp - old_logp).expand_as(logp), advantages, clip)


@checked
def cispo(
    logp: LogProbs, old_logp: LogProbs, advantages: Values, counted: Mask, clip: ClipRange
) -> TokenTerms:
    r"""REINFORCE with a clipped, detached importance weight: no token loses its gradient.

    .. math:: \ell_t = -\mathrm{sg}\big(\mathrm{clip}(\rho_t, 1 - \epsilon_{\mathrm{low}},
        1 + \epsilon_{\mathrm{high}})\big)\, A_t \log \pi_\theta(a_t)

    Equation: ``cispo``
    Source: MiniMax (2025), MiniMax-M1.
    Gradient: the clipped weight times :math:`-A_t \nabla \log \pi_\theta(a_t)`, never zero for the
        clip's sake. ``clipped`` marks the tokens whose weight was changed.

    Args, Returns: as :func:`grpo`. The value of the loss has no meaning, its gradient has.
    """
    ratio = (logp - old_logp).detach().exp()
    weight = ratio.clamp(clip.low, clip.high)
    clipped = (ratio < clip.low) | (ratio > clip.high)
    return TokenTerms(-weight * advantages * logp, ratio, clipped)


@checked
def reinforce(
    logp: LogProbs, old_logp: LogProbs, advantages: Values, counted: Mask, clip: ClipRange
) -> TokenTerms:
    r"""The plain policy gradient: no importance weight, hence right on-policy only.

    .. math:: \ell_t = -A_t \log \pi_\theta(a_t)

    Equation: ``reinforce``
    Source: Williams (1992).
    Gradient: :math:`-A_t \nabla \log \pi_\theta(a_t)`.

    Args, Returns: as :func:`grpo`; the weight is 1 whoever sampled, which no clip range changes.
    """
    weight = torch.where(old_logp.isnan(), torch.nan, torch.ones_like(advantages))
    return TokenTerms(-weight * advantages * logp, weight, torch.zeros_like(counted))


@checked
def grpo_off_policy(
    logp: LogProbs, old_logp: LogProbs, advantages: Values, counted: Mask, clip: ClipRange
) -> TokenTerms:
    r"""The GRPO form on advantages that already hold the KL term.

    .. math:: \ell_t = -\min\big(\rho_t \hat R_t,\
        \mathrm{clip}(\rho_t, 1 - \epsilon_{\mathrm{low}}, 1 + \epsilon_{\mathrm{high}})
        \hat R_t\big)

    So the KL term is weighted and clipped with the reward, and no token can be pushed by the one
    while the clip silences the other. Pass :math:`\hat R` from
    :func:`kl_term.objectives.credit.fold_kl` as ``advantages``.

    Equation: ``grpo_off_policy``
    Source: Liu, Liu and Liu, "Rethinking KL Divergence in RLHF" (March 2025), equation 39.

    Args, Returns: as :func:`grpo`.
    """
    return grpo(logp, old_logp, advantages, counted, clip)


#: Kinds of policy loss by name, without their guard: :func:`policy_loss` checks what it gives.
KINDS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, ClipRange], TokenTerms]] = {
    kind.__name__: unwrap(kind)
    for kind in (grpo, gspo, cispo, reinforce, grpo_off_policy, sequence)
}


def _clip_range(epsilon_low: float, epsilon_high: float) -> ClipRange:
    check_fraction("epsilon_low", epsilon_low)
    if math.isnan(epsilon_high) or epsilon_high < 0.0:
        raise ValueError(f"epsilon_high must be >= 0, got {epsilon_high!r}")
    return ClipRange(1.0 - epsilon_low, 1.0 + epsilon_high)


def _clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: ClipRange) -> TokenTerms:
    """Minus the minimum of the free and the clipped product.

    The minimum takes the clipped side exactly where the advantage asks for a move past the bound.
    There, and where the advantage is zero, the gradient is zero; the log-ratio is cut off before
    ``exp`` so that an overflow cannot turn that zero into NaN.
    """
    ratio = log_ratio.detach().exp()
    clipped = ((advantages > 0) & (ratio > clip.high)) | ((advantages < 0) & (ratio < clip.low))
    constant = clipped | (advantages == 0)
    free = torch.where(constant, 0.0, log_ratio).exp()
    effective = torch.where(constant, ratio.clamp(clip.low, clip.high), free)
    return TokenTerms(-effective * advantages, ratio, clipped)


def _row_sum(values: Tensor) -> Tensor:
    return values.sum(dim=-1, keepdim=True)
