r"""What a KL term descends on-policy, as one number: its potential.

At one state every variant has an expected gradient :math:`\mathbb{E}_{a \sim \pi_\theta}[C(a)
\nabla \log \pi_\theta(a)]` whose coefficient depends on the token through its own probability
alone. Such a field is the gradient of a sum of integrals, one a token, and here they are in closed
form.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from analysis.checks import check_choice, check_positive, checked, pair_of_floats
from analysis.kl.divergences import forward_kl, reverse_kl
from analysis.kl.names import PLACEMENTS, WEIGHTINGS
from analysis.kl.surrogates import ESTIMATORS, LOSS_ESTIMATORS
from analysis.kl.variance import estimator_means
from analysis.shapes import Logits, Values


@checked
def kl_potential(
    logits: Logits,
    ref_logits: Logits,
    *,
    estimator: str,
    placement: str = "loss",
    weighting: str = "none",
) -> Values:
    r"""The function whose gradient is the expected on-policy gradient of a KL term.

    .. math:: D^{\text{loss}} &: \quad k_1 \mapsto 0, \quad
        k_2 \mapsto \mathrm{KL}(\pi_\theta \Vert \pi_{\mathrm{ref}}), \quad
        k_3 \mapsto \mathrm{KL}(\pi_{\mathrm{ref}} \Vert \pi_\theta) \\
        D^{\text{attached}} &= \mathbb{E}_{\pi_\theta}[k], \qquad
        D^{\text{reward}} = \mathbb{E}_{\pi_\theta}[k] - D^{\text{loss}}

    because :math:`\nabla \mathbb{E}[k] = \mathbb{E}[\nabla k] + \mathbb{E}[k \nabla \log
    \pi_\theta]`: the two placements of an estimator share out the gradient of its mean. So k3 in
    the reward descends the reverse *minus* the forward KL.

    Equation: ``kl_potential``
    Sampler: :math:`a \sim \pi_\theta`.
    Gradient: :func:`analysis.kl.enumeration.expected_gradient`, on-policy.

    Args:
        logits, ref_logits: [..., V], policy and reference; both allow the same tokens.
        estimator: a name of :data:`analysis.kl.surrogates.LOSS_ESTIMATORS`.
        placement: ``loss`` or ``reward``.
        weighting: ``none``, ``attached`` or ``detached``; matters for a loss only.

    Returns:
        [...], nats (squared probabilities for ``minimax01``).

    Raises:
        ValueError: on ``minimax01`` in the reward or with the ratio attached: its value has no
            meaning.
    """
    check_choice("placement", placement, PLACEMENTS)
    check_choice("weighting", weighting, WEIGHTINGS)
    check_choice("estimator", estimator, LOSS_ESTIMATORS)
    as_loss = _DESCENDED[estimator](logits, ref_logits)
    if placement == "loss" and weighting != "attached":
        return as_loss
    if estimator not in ESTIMATORS:
        raise ValueError(f"{estimator} has a gradient but no value: use it as an unattached loss")
    mean = estimator_means(logits, ref_logits)[estimator]
    return mean if placement == "loss" else mean - as_loss


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
def capped_forward_kl(logits: Logits, ref_logits: Logits, max_ratio: float = 10.0) -> Values:
    r"""The forward KL of which no token can cost more than a cap: what clipped k3 descends.

    .. math:: \sum_a \pi_{\mathrm{ref}}(a) \log \frac{\pi_{\mathrm{ref}}(a)}
        {\max\big(\pi_\theta(a),\, \pi_{\mathrm{ref}}(a) / r_{\max}\big)}

    A token below :math:`\pi_{\mathrm{ref}} / r_{\max}` is past caring: losing the rest of it is
    free, and giving its probability to another token is a gain.

    Equation: ``capped_forward_kl``

    Args:
        logits, ref_logits: [..., V].
        max_ratio: the cap :math:`r_{\max}` of :func:`analysis.kl.estimators.k3_clip`.

    Returns:
        [...], nats.
    """
    check_positive("max_ratio", max_ratio)
    logits, ref_logits = pair_of_floats("logits", logits, "ref_logits", ref_logits)
    ref_logp = torch.log_softmax(ref_logits, dim=-1)
    log_ratio = ref_logp - torch.log_softmax(logits, dim=-1)
    return (ref_logp.exp() * log_ratio.clamp(max=math.log(max_ratio))).sum(-1)


def _nothing(logits: Tensor, ref_logits: Tensor) -> Tensor:
    return (logits * 0.0 + ref_logits * 0.0).sum(-1)


_DESCENDED = {
    "k1": _nothing,
    "k2": reverse_kl,
    "k3": forward_kl,
    "k4": forward_kl,
    "k3_clip": capped_forward_kl,
    "minimax01": half_squared_distance,
}
