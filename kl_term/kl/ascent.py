r"""Training without sampling noise: ascent along the exact expected gradient, at one state.

The gradient is the one a trainer's samples have in expectation, stop-gradients included, so where
the ascent ends is what the variant is *for*, whatever objective its authors had in mind.
"""

from __future__ import annotations

from typing import Literal

from kl_term.checks import check_same_shape, checked, pair_of_floats
from kl_term.kl.enumeration import sample_coefficient
from kl_term.plain_checks import check_choice
from kl_term.shapes import Logits

Geometry = Literal["natural", "plain"]
GEOMETRIES: tuple[Geometry, ...] = ("natural", "plain")

#: Log-prob at which a token counts as given up; its ratio to any reference still fits float64.
GIVEN_UP = -600.0


@checked
def token_advantage(
    logits: Logits,
    rewards: Logits,
    ref_logits: Logits,
    *,
    beta: float,
    estimator: str,
    placement: str = "loss",
    weighting: str = "none",
) -> Logits:
    r"""What the expected gradient credits each token with: reward minus KL coefficient, centred.

    .. math:: A(a) = R(a) - \beta C(a) - \mathbb{E}_{\pi_\theta}[R - \beta C], \qquad
        \nabla_z \big(\mathbb{E}[R] - \beta D\big) = \pi_\theta \odot A

    with :math:`C` of :func:`kl_term.kl.enumeration.sample_coefficient`, on-policy. A policy is a
    fixed point of the natural flow if and only if :math:`A` vanishes on every token it samples.

    Equation: ``token_advantage``
    Sampler: :math:`a \sim \pi_\theta`.

    Args:
        logits, rewards, ref_logits: [..., V], finite.
        beta: weight of the KL term; 0 leaves it out.
        estimator, placement, weighting: as in :func:`kl_term.kl.enumeration.sample_coefficient`.

    Returns:
        [..., V], in units of the reward.
    """
    logits, ref_logits = pair_of_floats("logits", logits, "ref_logits", ref_logits)
    check_same_shape("logits", logits, "rewards", rewards)
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    coefficient = sample_coefficient(
        logp, ref_logp, logp, estimator=estimator, placement=placement, weighting=weighting
    )
    credit = rewards - beta * coefficient
    return credit - (logp.exp() * credit).sum(-1, keepdim=True)


@checked
def expected_ascent(
    start_logits: Logits,
    rewards: Logits,
    ref_logits: Logits,
    *,
    beta: float,
    estimator: str,
    placement: str = "loss",
    weighting: str = "none",
    steps: int = 1000,
    step_size: float = 0.5,
    geometry: Geometry = "natural",
) -> Logits:
    r"""Follow a variant's exact expected gradient from a start.

    .. math:: z \leftarrow z + \eta\, A \;\text{(natural)}, \qquad
        z \leftarrow z + \eta\, \pi_\theta \odot A \;\text{(plain)}

    Both directions vanish at the same *interior* policies; the natural one, the same field
    preconditioned by the Fisher matrix, gets there in hundreds of steps. At the boundary they part:
    where :math:`\pi_\theta(b)\, C(b)` does not vanish with :math:`\pi_\theta(b)`, as under k3 in
    the reward, a truncation is an end of the natural flow and not even stationary for the plain
    one. A natural step moves no logit by more than one, and a token that falls to
    :data:`GIVEN_UP` stays there.

    Equation: ``expected_ascent``

    Args:
        start_logits, rewards, ref_logits: [..., V], finite.
        beta: weight of the KL term.
        estimator, placement, weighting: the variant.
        steps, step_size: length of the ascent.

    Returns:
        [..., V], log-probs of the policy at the end.
    """
    check_choice("geometry", geometry, GEOMETRIES)
    logp = start_logits.log_softmax(-1)
    for _ in range(steps):
        move = step_size * token_advantage(
            logp,
            rewards,
            ref_logits,
            beta=beta,
            estimator=estimator,
            placement=placement,
            weighting=weighting,
        )
        move = move.clamp(-1, 1) if geometry == "natural" else logp.exp() * move
        logp = (logp + move).log_softmax(-1).clamp(min=GIVEN_UP)
    return logp.log_softmax(-1)
