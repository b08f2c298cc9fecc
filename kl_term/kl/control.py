r"""The best control variate between k1 in the reward and k3 under the attached prefix ratio.

Both give the gradient of the sequence KL, and so does every mixture of them,

.. math:: c_u = R_u\, l_u + \sum_{t > u} R_t\, \big[ l_t + \lambda\, (r_t - 1) \big],

since :math:`r_t - 1` has mean zero given the past. At :math:`\lambda = 0` it is k1 to go, at 1 it
is k3, which is quiet near the reference and explodes where the policy gave a token up. The variance
is a parabola in :math:`\lambda`; here are its coefficients, and two ways to estimate where it is
least. The loss is ``KLTerm(estimator="k3", weighting="attached", ratio="prefix", control=...)``,
with a number or ``"fitted"``: then :class:`ControlFit` carries what was estimated from one batch to
the next.
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
    sums = control_sums(logp, ref_logp, old_logp, mask, squared_scores=squared_scores)
    return weight_of(sums.flatten(0, -2).sum(0))


@checked(nan="refused")
def control_sums(
    logp: LogProbs,
    ref_logp: LogProbs,
    old_logp: LogProbs,
    mask: Mask,
    *,
    squared_scores: Values | None = None,
) -> Tensor:
    r"""The two sums of :func:`fitted_control` over the tokens of each answer.

    .. math:: -\sum_t R_t\, (r_t - 1)\, S_t \sum_{u \ge t} R_u\, l_u, \qquad
        \sum_t R_t^2\, (r_t - 1)^2\, S_t

    Args: as :func:`fitted_control`.

    Returns:
        [..., 2], in float64 where there is one; add them up over answers before
        :func:`weight_of`.
    """
    counted = as_mask("mask", mask, "logp", logp)
    wide = _wide(logp.device)
    own, reference, old = (
        torch.where(counted, x.detach().to(wide), 0.0) for x in (logp, ref_logp, old_logp)
    )
    scores = torch.expm1(own).square() if squared_scores is None else squared_scores.to(wide)
    scores = torch.where(counted, scores.detach(), 0.0)
    past = functional.pad(scores.cumsum(-1)[..., :-1], (1, 0))
    ratio = importance_ratio(own, old, counted, level="prefix")
    variate = ratio * torch.expm1(reference - own)
    to_go = reward_to_go(ratio * (own - reference))
    products = -(variate * past * to_go).sum(-1)
    return torch.stack([products, (variate.square() * past).sum(-1)], dim=-1)


@checked(nan="refused")
def weight_of(sums: Tensor) -> Tensor:
    """The clipped quotient of sums [..., 2]: 1 where both are zero, 0 where one overflows."""
    return _clipped(sums[..., 0], sums[..., 1])


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


#: How much less the sums of a batch count with each batch after it.
MEMORY = 0.9
#: Both sums before the first batch, nats squared: more than rounding makes at the reference.
FIRST = 1e-6


class ControlFit:
    r"""The weight of the control variate that the batches *before* this one fit.

    .. math:: \lambda_n = \mathrm{clip}_{[0, 1]} \bigg(
        \frac{\sum_{i < n} \gamma^{n - i} P_i}{\sum_{i < n} \gamma^{n - i} Q_i} \bigg)

    with P and Q the sums of :func:`control_sums` over the answers of a batch, and :math:`\gamma` =
    :data:`MEMORY`: one batch may not have met the token that matters. Before the first batch both
    are :data:`FIRST`, and the weight is 1, that of k3, which is right near the reference, where
    runs begin. The weight never depends on the batch that it is used on, so the gradient keeps its
    mean. After a sum that overflows it is 0 for a batch, and the fit begins anew.

    Call :meth:`add` with every part of a batch, and :meth:`advance` before the next is sampled.

    Args:
        shape: of independent fits, such as the runs of a population.
        device: of the sums.
    """

    def __init__(self, *shape: int, device: torch.device | str | None = None) -> None:
        #: [shape, 2]: of the batches before, and of the parts of this one.
        self.sums = torch.full((*shape, 2), FIRST, dtype=_wide(device), device=device)
        self.pending = torch.zeros_like(self.sums)

    @property
    def weight(self) -> Tensor:
        """[shape], in [0, 1]: for ``KLTerm.loss(..., control=...)`` on this batch."""
        return _clipped(self.sums[..., 0], self.sums[..., 1])

    def add(self, sums: Tensor) -> None:
        """Sums [shape, 2] over answers of this batch, for the next one's weight."""
        self.pending += sums.detach().to(self.pending)

    def advance(self) -> None:
        """This batch is over: what it showed counts from now on."""
        kept = torch.where(self.sums.isfinite().all(-1, keepdim=True), MEMORY * self.sums, 0.0)
        self.sums.copy_(kept + self.pending)
        self.pending.zero_()


def _wide(device: torch.device | str | None) -> torch.dtype:
    """float64, where the device has it."""
    return torch.float32 if torch.device(device or "cpu").type == "mps" else torch.float64
