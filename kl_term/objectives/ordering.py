r"""The order of KL penalty and normalisation within a group: three trainers, three objectives.

Each function turns the task rewards of a group and the KL of each completion into advantages. They
differ in one thing: whether the KL is subtracted before or after the rewards are standardised.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kl_term.checks import at_least_float32, check_same_shape, checked
from kl_term.objectives.advantages import group_normalise, leave_one_out
from kl_term.plain_checks import check_not_negative
from kl_term.shapes import Rewards


@checked
def kl_then_normalise(
    rewards: Rewards, kl: Rewards, *, beta: float, ddof: int = 1, eps: float = 1e-4
) -> Rewards:
    r"""KL first: the penalised rewards are standardised.

    .. math:: A_i = \frac{S_i - \mathrm{mean}(S)}{\mathrm{std}(S) + \epsilon},
        \qquad S_i = R_i - \beta K_i

    The weight of the KL relative to the reward stays :math:`\beta`; both are divided by the spread
    of the *penalised* reward. With equal rewards :math:`\beta` cancels but for
    :math:`\epsilon/\beta`: the KL alone is blown up to unit standard deviation.

    Equation: ``kl_then_normalise``
    Source: the order of verl with GRPO advantages.

    Args:
        rewards: [..., G], one a completion.
        kl: [..., G], nats, the KL estimate of each completion; treated as constant.
        beta: the KL coefficient, at least 0.
        ddof, eps: as in :func:`kl_term.objectives.advantages.group_normalise`.

    Returns:
        [..., G], without gradient.

    Raises:
        ValueError: on a group of one.
    """
    return group_normalise(_penalised(rewards, kl, beta), ddof=ddof, eps=eps)


@checked
def normalise_then_kl(
    rewards: Rewards, kl: Rewards, *, beta: float, ddof: int = 1, eps: float = 1e-4
) -> Rewards:
    r"""Normalisation first: the KL is subtracted from the standardised rewards.

    .. math:: A_i = \frac{R_i - \mathrm{mean}(R)}{\mathrm{std}(R) + \epsilon}
        - \beta K_i

    In units of the reward the KL weighs :math:`\beta\, \mathrm{std}(R)`, another coefficient for
    each prompt. The KL has no baseline: its expected gradient is exact for every group size, and
    equal rewards leave it as it is.

    Equation: ``normalise_then_kl``
    Source: the order of OpenRLHF, and of ``fold_kl`` in :mod:`kl_term.objectives.credit`.

    Args, Returns, Raises: as :func:`kl_then_normalise`.
    """
    _check(rewards, kl, beta)
    advantages = group_normalise(rewards, ddof=ddof, eps=eps)
    return advantages - beta * at_least_float32(kl.detach())


@checked
def kl_then_leave_one_out(rewards: Rewards, kl: Rewards, *, beta: float) -> Rewards:
    r"""KL first, no division: the penalised rewards minus the mean of the others.

    .. math:: A_i = S_i - \frac{1}{G - 1} \sum_{j \ne i} S_j, \qquad S_i = R_i - \beta K_i

    The expected gradient is that of :math:`\mathbb{E}[R] - \beta\, \mathrm{KL}` for every group
    size.

    Equation: ``kl_then_leave_one_out``
    Source: the order of TRL's RLOO trainer.

    Args, Returns, Raises: as :func:`kl_then_normalise`.
    """
    return leave_one_out(_penalised(rewards, kl, beta))


#: The orders by name; all take ``rewards``, ``kl`` and ``beta``.
ORDERS: dict[str, Callable[..., Tensor]] = {
    order.__name__: order for order in (kl_then_normalise, normalise_then_kl, kl_then_leave_one_out)
}


def _penalised(rewards: Tensor, kl: Tensor, beta: float) -> Tensor:
    _check(rewards, kl, beta)
    return at_least_float32(rewards) - beta * at_least_float32(kl)


def _check(rewards: Tensor, kl: Tensor, beta: float) -> None:
    check_same_shape("rewards", rewards, "kl", kl)
    check_not_negative("beta", beta)
