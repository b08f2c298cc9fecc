r"""What a trainer differentiates or subtracts: KL losses, KL penalties and their coefficients.

An estimator of a *value* becomes an objective only through the way it is used. Four choices fix
its meaning, and implementations differ on each: the estimator, its placement (``kl_loss`` or
``kl_penalty``), the off-policy weight (``none``, ``attached``, ``detached``), and the level at
which it is summed. :mod:`kl_term.kl.enumeration` and :mod:`kl_term.kl.sequences` compute what
each combination optimises in expectation.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kl_term.checks import checked
from kl_term.kl.estimators import ESTIMATORS, TOKEN_ESTIMATORS
from kl_term.kl.importance import importance_ratio
from kl_term.kl.names import RATIO_LEVELS, WEIGHTINGS
from kl_term.kl.packing import by_sequence
from kl_term.plain_checks import check_choice
from kl_term.shapes import LogProbs, Mask, Tokens, Values


@checked
def kl_loss(
    logp: LogProbs,
    ref_logp: LogProbs,
    *,
    old_logp: LogProbs | None = None,
    estimator: str = "k3",
    weighting: str = "none",
    ratio: str = "token",
    mask: Mask | None = None,
    control: float | Tensor = 1.0,
    sequence_ids: Tokens | None = None,
) -> Values:
    r"""Per-token KL term of a loss to be minimised.

    .. math:: \ell_t = w_t\, k(l_t), \qquad
        w_t = \begin{cases} 1 & \text{none} \\ \rho_t & \text{attached} \\
        \mathrm{sg}(\rho_t) & \text{detached} \end{cases}, \qquad
        \rho_t = \pi_\theta(a_t) / \pi_{\mathrm{old}}(a_t)

    On-policy, at a state or summed over tokens (not under a weight that depends on the length), the
    expected gradient is zero for k1, that of the reverse KL for k2 and that of the *forward* KL for
    k3. Under stale samples only these choices still give the gradient of the reverse KL at the
    visited states: k1, k3 or k4 attached, and k2 detached. With ``ratio="prefix"``, k1, k3 or k4
    attached give that of the whole sequence KL, k3 and k4 only where the policy allows every token
    that the reference allows. All of them need a sampler that allows every token of the policy.

    Attached, autograd adds :math:`\rho_t k` and :math:`\rho_t k'`. For k3 and k4 their :math:`r`
    cancels, so where :math:`r` exceeds the inverse of the precision the gradient is lost to
    rounding (float32: :math:`l_t < -16`). Where :math:`r` overflows and :math:`\rho_t` underflows
    the result is NaN.

    Equation: ``kl_loss``
    Sampler: :math:`a_t \sim \pi_{\mathrm{old}}`.

    Args:
        logp: [...], log-probs of the sampled tokens under the trained policy, with gradient.
        ref_logp: [...], under the reference; treated as constant.
        old_logp: [...], under the policy that sampled; treated as constant. For a weighting only,
            which needs it; on-policy pass ``logp.detach()``.
        estimator: a name of :data:`kl_term.kl.estimators.TOKEN_ESTIMATORS`. One without a value
            is the loss that has its gradient, as :func:`minimax01`.
        weighting: ``none``, ``attached`` (gradient flows through the ratio) or ``detached``.
        ratio: which ratio weighs a token, by :func:`kl_term.kl.importance.importance_ratio`; all
            but ``token`` read the last axis as the tokens of a completion.
        mask: [...], True = counted. Masked positions, whatever they hold, give exactly zero value
            and gradient.
        control: weight of the control variate of k3, by :func:`controlled`; another than
            1 is for an attached weight. A number, or a tensor of them that broadcasts.
        sequence_ids: [..., T] integers, where a row holds several sequences: see
            :mod:`kl_term.kl.packing`. Without them a row is one sequence.

    Returns:
        [...], nats per token.

    Raises:
        ValueError: on a missing ``old_logp`` or an argument that would go unread.
    """
    check_choice("estimator", estimator, TOKEN_ESTIMATORS)
    check_choice("weighting", weighting, WEIGHTINGS)
    check_choice("ratio", ratio, RATIO_LEVELS)
    _refuse_unread(old_logp, weighting, ratio)
    whole = not isinstance(control, Tensor) and control == 1.0
    if not whole and (estimator, weighting) != ("k3", "attached"):
        raise ValueError(
            "control would go unread: it weighs k3's control variate under an attached ratio"
        )
    if sequence_ids is not None:
        alike = partial(
            kl_loss, estimator=estimator, weighting=weighting, ratio=ratio, control=control
        )
        given = {"logp": logp, "ref_logp": ref_logp, "old_logp": old_logp}
        return by_sequence(alike, sequence_ids, mask, **given)
    logp, ref_logp = _counted_pair(logp, ref_logp, mask)
    ref_logp = ref_logp.detach()
    if not whole:
        loss = controlled(logp, ref_logp, control=control)
    elif estimator in ESTIMATORS:
        loss = ESTIMATORS[estimator](logp, ref_logp)
    else:
        loss = gradient_coefficient(logp, ref_logp, estimator=estimator) * logp
    if weighting == "none" or old_logp is None:
        return loss
    counted = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    weight = importance_ratio(logp, old_logp, counted, level=ratio)
    weighted = (weight if weighting == "attached" else weight.detach()) * loss
    return weighted if mask is None else torch.where(counted.bool(), weighted, 0.0)


@checked
def kl_penalty(
    logp: LogProbs,
    ref_logp: LogProbs,
    *,
    estimator: str = "k1",
    mask: Mask | None = None,
    sequence_ids: Tokens | None = None,
) -> Values:
    r"""Per-token KL term of a reward: the estimator's value, detached.

    .. math:: \tilde r_t = r_t - \beta\, \mathrm{sg}\big(k(l_t)\big)

    The policy gradient then weighs :math:`\nabla \log \pi_\theta` with :math:`k`. For k1 that is
    the gradient of the reverse KL; for k2 and k3 it is the gradient of neither KL.

    Equation: ``kl_penalty``
    Sampler: :math:`a_t \sim \pi_\theta`, on-policy.

    Args:
        logp: [...], log-probs of the sampled tokens under the policy that sampled them.
        ref_logp: [...], under the reference.
        estimator: a name of :data:`kl_term.kl.estimators.ESTIMATORS`.
        mask: [...], True = counted; masked positions give exactly zero.
        sequence_ids: [..., T], as in :func:`kl_loss`; a token's penalty depends on no other.

    Returns:
        [...], nats per token, without gradient.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    if sequence_ids is not None:
        alike = partial(kl_penalty, estimator=estimator)
        return by_sequence(alike, sequence_ids, mask, logp=logp, ref_logp=ref_logp)
    logp, ref_logp = _counted_pair(logp, ref_logp, mask)
    return ESTIMATORS[estimator](logp.detach(), ref_logp.detach())


@checked
def controlled(logp: LogProbs, ref_logp: LogProbs, *, control: float | Tensor) -> Values:
    r"""k3 with another weight of its control variate, for an attached prefix ratio.

    .. math:: \mathrm{sg}(l) + \lambda\, \big( r - 1 + l - \mathrm{sg}(l) \big)

    Its value is :math:`k_1 + \lambda (r - 1)`. Under an attached ratio a token pays :math:`l` for
    itself whatever the weight, without the constant that k1 carries there.

    Equation: ``controlled``
    Gradient: :math:`\lambda\, (1 - r) \nabla \log \pi_\theta`, which alone is of no use.

    Args:
        logp, ref_logp: [...], as :func:`kl_term.kl.estimators.k1`.
        control: the weight, 1 for k3; a number, or a tensor of them that broadcasts.

    Returns:
        [...], nats.
    """
    ref_log_ratio = logp - ref_logp
    quiet = torch.expm1(-ref_log_ratio) + ref_log_ratio
    return (1 - control) * ref_log_ratio.detach() + control * quiet


@checked(half="kept")
def straight_through(value: Values, gradient: Values) -> Values:
    r"""A loss that reports one estimator and is differentiated as another.

    .. math:: \ell = \mathrm{sg}(v) + g - \mathrm{sg}(g)

    What a log shows and what training follows then differ: k3's value with k2's gradient reads as
    a KL that is never negative and moves the policy along the reverse KL.

    Equation: ``straight_through``
    Source: Bengio et al. (2013), the straight-through estimator; ``+`` types of verl's KL loss.
    Gradient: that of ``gradient``.

    Args:
        value: [...], nats; what the result equals.
        gradient: [...], nats; what it is differentiated as.

    Returns:
        [...]; NaN where ``gradient`` is infinite, so that its overflow stays visible.
    """
    return value.detach() + (gradient - gradient.detach())


@checked
def minimax01(logp: LogProbs, ref_logp: LogProbs) -> Values:
    r"""The KL term of MiniMax-01: the difference of probabilities as coefficient.

    .. math:: \mathrm{sg}\big(\pi_\theta(a) - \pi_{\mathrm{ref}}(a)\big) \log \pi_\theta(a)

    Its expected gradient on-policy is that of
    :math:`\sum_a \tfrac12 \pi_\theta(a)^2 - \pi_\theta(a) \pi_{\mathrm{ref}}(a)`, half the squared
    Euclidean distance of the two distributions: no KL in either direction.

    Equation: ``minimax01``
    Source: MiniMax (2025), MiniMax-01, section 5.4.2; Liu et al. (2025), figure 1, appendix F.
    Sampler: :math:`a \sim \pi_\theta`.

    Args, Returns: as :func:`kl_term.kl.estimators.k1`. The value has no meaning, only
    the gradient has.
    """
    return kl_loss(logp, ref_logp, estimator="minimax01")


@checked
def gradient_coefficient(logp: LogProbs, ref_logp: LogProbs, *, estimator: str) -> Values:
    r"""The number that multiplies :math:`\nabla \log \pi_\theta` when the estimator is a loss.

    .. math:: c(l) = \frac{\partial k}{\partial l}: \quad
        k_1: 1, \quad k_2: l, \quad k_3, k_4: 1 - r, \quad
        k_{3,\mathrm{clip}}: 1 - r\,[r \le r_{\max}], \quad
        \text{MiniMax-01: } \pi_\theta - \pi_{\mathrm{ref}}

    Equation: ``gradient_coefficient``
    Source: Liu et al. (2025), figure 1.

    Args:
        logp: [...], log-probs of the sampled tokens under the policy.
        ref_logp: [...], under the reference.
        estimator: a name of :data:`kl_term.kl.estimators.TOKEN_ESTIMATORS`.

    Returns:
        [...], dimensionless, without gradient. At the cap itself, ``k3_clip`` takes the side
        below, as autograd does.
    """
    check_choice("estimator", estimator, TOKEN_ESTIMATORS)
    return TOKEN_ESTIMATORS[estimator].slope(logp.detach(), ref_logp.detach())


def _refuse_unread(old_logp: Tensor | None, weighting: str, ratio: str) -> None:
    """The sampler's log-probs and the kind of ratio mean something with a weighting only."""
    if weighting != "none" and old_logp is None:
        raise ValueError(
            f"old_logp is needed for weighting={weighting!r}: pass the sampler's log-probs "
            "(on-policy: logp.detach())"
        )
    if weighting == "none" and (old_logp is not None or ratio != "token"):
        unread = "old_logp" if old_logp is not None else f"ratio={ratio!r}"
        raise ValueError(
            f"{unread} would go unread with weighting='none': leave it out, or set weighting to "
            "'attached' or 'detached'"
        )


def _counted_pair(logp: Tensor, ref_logp: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Masked positions become a log-prob of 0 on both sides *before* any maths.

    Every estimator and its coefficient vanish at ``logp = ref_logp`` except k1's coefficient,
    whose path the ``where`` cuts as well: so nothing a padded position holds can leak.
    """
    if mask is None:
        return logp, ref_logp
    counted = mask.bool()
    return torch.where(counted, logp, 0.0), torch.where(counted, ref_logp, 0.0)
