r"""What a KL term descends on-policy, as one number: its potential.

At one state every variant has an expected gradient :math:`\mathbb{E}_{a \sim \pi_\theta}[C(a)
\nabla \log \pi_\theta(a)]` whose coefficient depends on the token through its own probability
alone. Such a field is the gradient of a sum of integrals, one a token, and here they are in closed
form.
"""

from __future__ import annotations

from kl_term.checks import checked
from kl_term.kl.estimators import ESTIMATORS, POTENTIALS
from kl_term.kl.names import PLACEMENTS, WEIGHTINGS
from kl_term.kl.variance import estimator_means
from kl_term.plain_checks import check_choice
from kl_term.shapes import Logits, Values


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
    Gradient: :func:`kl_term.kl.enumeration.expected_gradient`, on-policy.

    Args:
        logits, ref_logits: [..., V], policy and reference; both allow the same tokens.
        estimator: a name of :data:`kl_term.kl.estimators.POTENTIALS`.
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
    check_choice("estimator", estimator, POTENTIALS)
    as_loss = POTENTIALS[estimator](logits, ref_logits)
    if placement == "loss" and weighting != "attached":
        return as_loss
    if estimator not in ESTIMATORS:
        raise ValueError(f"{estimator} has a gradient but no value: use it as an unattached loss")
    mean = estimator_means(logits, ref_logits)[estimator]
    return mean if placement == "loss" else mean - as_loss
