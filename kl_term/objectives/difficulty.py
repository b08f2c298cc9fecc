r"""How much a prompt counts, by how often the policy solves it.

With binary rewards the expected gradient of a group is a *number* times the gradient of the success
probability :math:`p` of its prompt. That number is the prompt's weight, and its integral over
:math:`p` is the objective that the advantage ascends instead of :math:`p`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kl_term.checks import at_least_float32, check_float, check_probabilities, checked
from kl_term.objectives.groups import standardise
from kl_term.shapes import Values


@checked
def difficulty_weight(
    success: Values, group_size: int, *, ddof: int = 1, eps: float = 1e-4
) -> Tensor:
    r"""Weight of a prompt under the normalised advantage, exact for every group size.

    .. math:: w_G(p) = \frac{G - 1}{G}\; \mathbb{E}_{K \sim \mathrm{Bin}(G - 2,\, p)}
        \left[\frac{1}{\sigma_{K + 1} + \epsilon}\right], \qquad
        \mathbb{E}\Big[\tfrac1G \sum_i A_i \nabla \log \pi_\theta(o_i)\Big] = w_G(p)\, \nabla p

    where :math:`\sigma_k` is the standard deviation of a group with :math:`k` right answers. In
    every group that counts, one answer is right and one is wrong; only the other :math:`G - 2` are
    free. Without eps and with ``ddof=0`` it tends to :math:`1/\sqrt{p(1 - p)}` as the group grows,
    and never exceeds :math:`\sqrt{G - 1}`. Centred rewards have weight :math:`(G - 1)/G`,
    leave-one-out weight 1, at every :math:`p`.

    Equation: ``difficulty_weight``

    Args:
        success: [...], the probability :math:`p`, in [0, 1].
        group_size: :math:`G`, at least 2.
        ddof: as in :func:`kl_term.objectives.advantages.group_normalise`.
        eps: as there.

    Returns:
        [...], dimensionless.

    Raises:
        ValueError: on a group of one.
    """
    inverse_std = _inverse_stds(group_size, ddof=ddof, eps=eps)
    chances = _binomial(success, group_size - 2)
    weight = (group_size - 1) / group_size * (chances * inverse_std.to(chances.device)).sum(-1)
    return weight.to(at_least_float32(success).dtype)


@checked
def normalised_objective(
    success: Values, group_size: int, *, ddof: int = 1, eps: float = 1e-4
) -> Tensor:
    r"""What the normalised advantage ascends in place of the success probability.

    .. math:: F_G(p) = \int_0^p w_G(u)\, du = \frac1G
        \sum_{k=1}^{G-1} \frac{1}{\sigma_k + \epsilon}\; \Pr\big(\mathrm{Bin}(G - 1, p) \ge k\big)

    Equation: ``normalised_objective``

    Args, Raises: as :func:`difficulty_weight`.

    Returns:
        [...], 0 at 0; increasing in ``success``.
    """
    inverse_std = _inverse_stds(group_size, ddof=ddof, eps=eps)
    chances = _binomial(success, group_size - 1)
    at_least = chances.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    objective = (at_least * inverse_std.to(chances.device)).sum(-1) / group_size
    return objective.to(at_least_float32(success).dtype)


@checked
def arcsine_objective(success: Values) -> Tensor:
    r"""The limit of :func:`normalised_objective` for large groups (``ddof`` any, no eps).

    .. math:: F_\infty(p) = \int_0^p \frac{du}{\sqrt{u (1 - u)}} = 2 \arcsin \sqrt{p}

    Equation: ``arcsine_objective``

    Args:
        success: [...], in [0, 1].

    Returns:
        [...], from 0 to :math:`\pi`.
    """
    check_float("success", success)
    return 2 * at_least_float32(success).sqrt().asin()


def _inverse_stds(group_size: int, *, ddof: int, eps: float) -> Tensor:
    """[G - 1]: one over std plus eps of a group with k = 1 .. G - 1 right answers."""
    if group_size < 2:
        raise ValueError(f"group_size must be at least 2, got {group_size!r}")
    right = torch.arange(1, group_size, dtype=torch.float64)
    groups = (torch.arange(group_size) < right[:, None]).to(torch.float64)
    everyone = torch.ones_like(groups, dtype=torch.bool)
    standardised = standardise(groups, everyone, ddof=ddof, eps=eps)
    return standardised[:, 0] / (1 - right / group_size)


def _binomial(success: Tensor, trials: int) -> Tensor:
    """[..., trials + 1] float64: probabilities of each number of successes."""
    check_probabilities("success", success)
    success = success.double().unsqueeze(-1)
    count = torch.arange(trials + 1, dtype=torch.float64, device=success.device)
    rest = trials - count
    log_choose = math.lgamma(trials + 1) - torch.lgamma(count + 1) - torch.lgamma(rest + 1)
    return torch.exp(
        log_choose + torch.xlogy(count, success) + torch.special.xlog1py(rest, -success)
    )
