r"""Coefficients that follow the KL: what the controllers in use do with one measured value.

Each function is one step, from a coefficient and the KL that was measured under it to the next
coefficient. The KL per token or per answer, as the target is.
"""

from __future__ import annotations

import math

from kl_term.checks import checked
from kl_term.plain_checks import check_not_negative, check_positive


@checked
def proportional_step(
    beta: float, kl: float, *, target: float, horizon: float, clip: float = 0.2
) -> float:
    r"""Raise the coefficient by the relative error of the KL, clipped.

    .. math:: \beta \leftarrow \beta\, \Big(1 + \frac{1}{h}\, \mathrm{clip}\Big(
        \frac{\mathrm{KL}}{\delta} - 1,\; \pm c\Big)\Big)

    Equation: ``proportional_step``
    Source: Ziegler et al. (2019), section 2.2, whose horizon is in answers: with n of them a step,
        h is their horizon over n.

    Args:
        beta: the coefficient under which the KL was measured.
        kl: the measured value; an estimate may be negative.
        target: :math:`\delta`.
        horizon: :math:`h`, in steps.
        clip: :math:`c`, below the horizon; infinity for none.

    Raises:
        ValueError: a clip from which the coefficient might turn negative. Without one, a KL far
            below zero can make it zero, and it stays there.
    """
    check_positive("target", target)
    check_positive("horizon", horizon)
    if not clip > 0:
        raise ValueError(f"clip must be > 0, got {clip!r}")
    if math.isfinite(clip) and clip >= horizon:
        raise ValueError(f"clip={clip} must be below horizon={horizon}, or beta may turn negative")
    error = min(max(kl / target - 1, -clip), clip)
    return beta * max(0.0, 1 + error / horizon)


@checked
def doubling_step(beta: float, kl: float, *, target: float) -> float:
    r"""Double the coefficient far above the target, halve it far below.

    .. math:: \beta \leftarrow 2 \beta \;\text{ if } \mathrm{KL} > 1.5\, \delta, \qquad
        \beta \leftarrow \beta / 2 \;\text{ if } \mathrm{KL} < \delta / 1.5

    Equation: ``doubling_step``
    Source: Schulman et al. (2017), PPO, section 4, whose KL is from the policy of the last update.

    Args:
        beta, kl, target: as :func:`proportional_step`.
    """
    check_positive("target", target)
    if kl > 1.5 * target:
        return 2 * beta
    return beta / 2 if kl < target / 1.5 else beta


@checked
def multiplier_step(beta: float, kl: float, *, target: float, rate: float) -> float:
    r"""A step of dual ascent on the multiplier of the constraint that the KL be at most a target.

    .. math:: \beta \leftarrow \max\big(0,\; \beta + \rho\, (\mathrm{KL} - \delta)\big)

    Equation: ``multiplier_step``

    Args:
        beta, kl, target: as :func:`proportional_step`.
        rate: :math:`\rho`, in units of the reward per nat squared.
    """
    check_positive("target", target)
    check_positive("rate", rate)
    return max(0.0, beta + rate * (kl - target))


@checked
def steady_horizon(*, elasticity: float, follow: float, proportional: float = 0.0) -> float:
    r"""The shortest horizon at which the coefficient nears its target without overshooting.

    .. math:: h = \frac{4\, E}{a\, (1 + P)^2}, \qquad E = - \frac{d \log \mathrm{KL}}{d \log \beta}

    for :func:`proportional_step` inside its clip, on a policy that makes up the share :math:`a` of
    its distance to the optimum in each step. P is the gain, times the elasticity, of a part that
    answers the error at once (a PI controller in the logarithm of the coefficient); here zero.

    Equation: ``steady_horizon``

    Args:
        elasticity: :math:`E`; 2 near the reference.
        follow: :math:`a`, in (0, 1); on the natural flow the step size times the coefficient.
        proportional: :math:`P`, below :math:`1 / a - 1`.

    Returns:
        In steps.
    """
    check_positive("elasticity", elasticity)
    check_positive("follow", follow)
    check_not_negative("proportional", proportional)
    if follow * (1 + proportional) >= 1:
        raise ValueError(f"follow={follow} with proportional={proportional} overshoots by itself")
    return 4 * elasticity / (follow * (1 + proportional) ** 2)
