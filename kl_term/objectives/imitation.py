r"""What an imitator's errors cost over a horizon, on the chain where this is exact."""

from __future__ import annotations

from kl_term.checks import checked
from kl_term.plain_checks import check_fraction


@checked
def imitation_cost(error: float, horizon: int, recovery: float) -> float:
    r"""Expected steps off the teacher's path, on a chain.

    .. math:: C(T) = \sum_{t=1}^{T} d_t, \qquad
        d_t = d_{t-1} (1 - c) + (1 - d_{t-1})\, \epsilon, \qquad d_0 = 0

    On the path the imitator errs with probability :math:`\epsilon` a step; off it, it finds back
    with probability :math:`c` a step. Cloning that never saw an off-path state has no reason to
    recover: :math:`c = 0` gives :math:`C \approx \epsilon T^2 / 2` while :math:`\epsilon T` is
    small. An imitator trained on its own states recovers: :math:`c = 1 - \epsilon` gives exactly
    :math:`\epsilon T`.

    Equation: ``imitation_cost``
    Source: Ross and Bagnell (2010).

    Args:
        error: :math:`\epsilon`, in [0, 1].
        horizon: :math:`T`, at least 1.
        recovery: :math:`c`, in [0, 1].

    Returns:
        Steps, from 0 to ``horizon``.
    """
    check_fraction("error", error)
    check_fraction("recovery", recovery)
    if horizon < 1:
        raise ValueError(f"horizon must be at least 1, got {horizon!r}")
    decay = 1.0 - error - recovery  # d_t = error (1 + decay + ... + decay^(t - 1))
    steps, power, off, cost = 0, 1.0, 0.0, 0.0  # decay^steps; d_t and its sum, over error
    for bit in f"{horizon:b}":  # double the steps, then add one: nothing is subtracted
        cost, off = cost + steps * off + power * cost, off + power * off
        steps, power = 2 * steps, power * power
        if bit == "1":
            steps, power, off = steps + 1, power * decay, 1.0 + decay * off
            cost += off
    return error * cost
