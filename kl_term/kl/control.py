r"""The best control variate between k1 in the reward and k3 under the attached prefix ratio.

Both give the gradient of the sequence KL, and so does every mixture of them,

.. math:: c_u = R_u\, l_u + \sum_{t > u} R_t\, \big[ l_t + \lambda\, (r_t - 1) \big],

since :math:`r_t - 1` has mean zero given the past. At :math:`\lambda = 0` it is k1 to go, at 1 it
is k3, which is quiet near the reference and explodes where the policy gave a token up. The variance
is a parabola in :math:`\lambda`; here are its coefficients, and two ways to estimate where it is
least. The loss is ``KLTerm(estimator="k3", weighting="attached", ratio="prefix", control=...)``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kl_term.checks import as_mask, check_same_shape, checked
from kl_term.kl.credit import state_average
from kl_term.kl.importance import importance_ratio
from kl_term.kl.returns import reward_to_go
from kl_term.kl.sequences import Sequences, sequence_probability, token_logp
from kl_term.shapes import LogProbs, Mask, Table, Values


class ControlVariance(NamedTuple):
    r"""The variance beyond that at zero: :math:`a \lambda^2 + 2 b \lambda`."""

    curvature: Tensor  #: a, never negative
    slope: Tensor  #: b

    @property
    def best(self) -> Tensor:
        r""":math:`-b / a`: where the variance is least; not clipped."""
        return -self.slope / self.curvature


@checked
def control_variance(
    logits: Table, ref_logits: Table, sequences: Sequences, old_logits: Table | None = None
) -> ControlVariance:
    r"""How the variance of one answer's gradient depends on the weight of :math:`r - 1`.

    .. math::

        \begin{aligned}
        &\mathrm{Var}(\lambda) - \mathrm{Var}(0) = \mathbb{E}_{y \sim \pi_{\mathrm{old}}}
        \sum_t R_t^2\, S_t\, \big[ \lambda^2 (r_t - 1)^2 + 2 \lambda\, (r_t - 1)\, Q_t \big], \\
        &S_t = \sum_{u < t} \Vert \nabla \log \pi_\theta(y_u | y_{<u}) \Vert^2, \\
        &Q_t = \mathbb{E}_{\pi_\theta} \Big[ \sum_{u \ge t} l_u \,\Big|\, y_{\le t} \Big]
        \end{aligned}

    Traces of covariances, for any baseline that is known before its token.

    Equation: ``control_variance``
    Sampler: :math:`y \sim \pi_{\mathrm{old}}`; on-policy if ``old_logits`` is left out.

    Args:
        logits, ref_logits, old_logits: [states, vocab], policy, reference, sampler; one row a
            prefix, all positive.

    Returns:
        The curvature and the slope, scalars, nats squared.
    """
    sampler = logits if old_logits is None else old_logits
    logp, ref_logp, old_logp = (token_logp(x, sequences) for x in (logits, ref_logits, sampler))
    ref_log_ratio = logp - ref_logp
    to_go = reward_to_go(ref_log_ratio)
    action_values = state_average(to_go, logits, sequences, by_action=True)
    owed = action_values[sequences.states, sequences.tokens]
    policy = logits.softmax(-1)
    squared = 1 - 2 * logp.exp() + policy.square().sum(-1)[sequences.states]  # |e_a - pi|^2
    past = torch.where(sequences.mask, squared, 0.0).cumsum(-1) - squared
    variate = torch.expm1(-ref_log_ratio)
    ratio = importance_ratio(logp, old_logp, sequences.mask, level="prefix")
    weight = torch.where(sequences.mask, ratio.square() * past, 0.0)
    probability = sequence_probability(sampler, sequences)
    return ControlVariance(
        probability @ (weight * variate.square()).sum(-1),
        probability @ (weight * variate * owed).sum(-1),
    )


@checked(nan="refused")
def fitted_control(
    logp: LogProbs,
    ref_logp: LogProbs,
    old_logp: LogProbs,
    mask: Mask,
    *,
    squared_scores: Values | None = None,
) -> Tensor:
    r"""The weight of the control variate that suits a batch of answers; use it on the next batch.

    .. math:: \hat\lambda = \mathrm{clip}_{[0, 1]} \bigg( -
        \frac{\sum_{y, t} R_t\, (r_t - 1)\, S_t \sum_{u \ge t} R_u\, l_u}
        {\sum_{y, t} R_t^2\, (r_t - 1)^2\, S_t} \bigg), \qquad
        S_t = \sum_{u < t} \Vert \nabla \log \pi_\theta(y_u | y_{<u}) \Vert^2

    Its two sums estimate those of :func:`control_variance`. With shared parameters the inner
    products of scores that they leave out may matter: see :func:`fitted_control_of_gradients`. A
    weight fitted on the batch that it is used on is a bias.

    Equation: ``fitted_control``
    Sampler: :math:`y \sim \pi_{\mathrm{old}}`.

    Args:
        logp, ref_logp, old_logp: [..., T], of the sampled tokens under policy, reference, sampler.
        mask: [..., T], True = counted.
        squared_scores: [..., T], squared norm of each token's score; by the logits it is
            :math:`1 - 2 \pi_\theta(y_t) + \sum_a \pi_\theta(a)^2`. None takes
            :math:`(1 - \pi_\theta(y_t))^2`, the part of the token's own logit.

    Returns:
        A scalar in [0, 1]: 1 where no :math:`r` differs from 1, 0 where a sum overflows.
    """
    counted = as_mask("mask", mask, "logp", logp)
    own, reference, old = (
        torch.where(counted, x.detach().double(), 0.0) for x in (logp, ref_logp, old_logp)
    )
    scores = torch.expm1(own).square() if squared_scores is None else squared_scores.double()
    scores = torch.where(counted, scores.detach(), 0.0)
    past = functional.pad(scores.cumsum(-1)[..., :-1], (1, 0))
    ratio = importance_ratio(own, old, counted, level="prefix")
    variate = ratio * torch.expm1(reference - own)
    to_go = reward_to_go(ratio * (own - reference))
    return _clipped(-(variate * past * to_go).sum(), (variate.square() * past).sum())


@checked(nan="refused")
def fitted_control_of_gradients(plain: Tensor, quiet: Tensor) -> Tensor:
    r"""The same from gradients: exact with shared parameters, as the number of rows grows.

    .. math:: \hat\lambda = \mathrm{clip}_{[0, 1]} \bigg(
        \frac{\sum_i \langle P_i - \bar P,\; P_i - K_i - \overline{(P - K)} \rangle}
        {\sum_i \Vert P_i - K_i - \overline{(P - K)} \Vert^2} \bigg)

    Equation: ``fitted_control_of_gradients``

    Args:
        plain: [n, D], n >= 2, :math:`P`, gradient of the loss at control 0 on each answer or
            micro-batch.
        quiet: [n, D], :math:`K`, at control 1, of the same answers.

    Returns:
        A scalar in [0, 1]; 1 where the two agree.
    """
    check_same_shape("plain", plain, "quiet", quiet)
    centred, step = (x.double() - x.double().mean(0) for x in (plain, plain - quiet))
    return _clipped((centred * step).sum(), step.square().sum())


def _clipped(product: Tensor, square: Tensor) -> Tensor:
    best = torch.where(square == 0, 1.0, product / square)
    return torch.nan_to_num(best, nan=0.0).clamp(0.0, 1.0)
