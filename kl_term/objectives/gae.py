r"""Generalised advantage estimation, and what it makes of a KL in the reward.

GAE trades variance for bias with two numbers, :math:`\gamma` and :math:`\lambda`, and a critic.
For a game that bias is a choice of horizon. For the KL of a sequence what is left is in general the
gradient of no objective: :func:`gae_kl_gradient` is the exact expected direction, to be compared
with the gradient of the sequence KL.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kl_term.checks import as_mask, check_comes_first, check_float, check_same_shape, checked
from kl_term.kl.credit import credit_moments, state_average
from kl_term.kl.sequences import Sequences, can_draw, token_logp
from kl_term.kl.surrogates import kl_penalty
from kl_term.objectives.credit import reward_to_go
from kl_term.plain_checks import check_choice, check_fraction
from kl_term.shapes import Mask, Table, Values

CRITICS = ("zero", "exact", "scaled")


@checked
def generalised_advantage(
    rewards: Values, values: Values, mask: Mask, *, gamma: float = 1.0, lam: float = 0.95
) -> Values:
    r"""Generalised advantage estimation over completions, which end with their last counted token.

    .. math:: A_t = \sum_{j \ge 0} (\gamma\lambda)^j\, \delta_{t+j}, \qquad
        \delta_t = R_t + \gamma V(s_{t+1}) - V(s_t)

    Equation: ``generalised_advantage``
    Source: Schulman et al. (2016), "High-Dimensional Continuous Control Using Generalized
        Advantage Estimation".

    Args:
        rewards: [..., T], one a token.
        values: [..., T], the critic's value of the state each token is drawn in.
        mask: [..., T], True = counted; counted tokens come first. The state after the last one is
            terminal, with value 0.
        gamma: the discount, in [0, 1].
        lam: the decay :math:`\lambda`, in [0, 1].

    Returns:
        [..., T], in the unit of the rewards, without gradient; exactly 0 where masked.

    Raises:
        ValueError: on a mask that counts a token after a masked one.
    """
    check_fraction("lam", lam)
    check_float("rewards", rewards)
    check_same_shape("rewards", rewards, "values", values)
    counted = as_mask("mask", mask, "rewards", rewards)
    check_comes_first("mask", counted)
    values = torch.where(counted, values.detach(), 0.0)
    following = functional.pad(values[..., 1:], (0, 1))
    errors = torch.where(counted, rewards.detach() + gamma * following - values, 0.0)
    return torch.where(counted, reward_to_go(errors, gamma=gamma * lam), 0.0)


@checked
def gae_kl_gradient(
    logits: Table,
    ref_logits: Table,
    sequences: Sequences,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    critic: str = "exact",
) -> Tensor:
    r"""Exact expected gradient of k1 in the reward through GAE, on-policy.

    .. math:: \mathbb{E}_{y \sim \pi_\theta} \sum_t A_t[l]\, \nabla \log \pi_\theta(y_t | y_{<t})

    With :math:`V` the undiscounted KL to go and :math:`\hat V` the critic, it is the gradient of
    the sequence KL plus

    .. math:: \mathbb{E}_{y \sim \pi_\theta} \sum_t \Big(\sum_{j \ge 1} (\gamma\lambda)^{j-1}\,
        \varepsilon(s_{t+j})\Big) \nabla \log \pi_\theta(y_t | y_{<t}), \qquad
        \varepsilon = \gamma (1 - \lambda) \hat V - (1 - \gamma\lambda) V

    with :math:`\varepsilon = 0` past the last token. So it is exact if
    :math:`\gamma = \lambda = 1`, and for every :math:`0 < \gamma \le 1`, :math:`\lambda < 1` with
    the scaled critic. With a zero critic it is reward-to-go with discount :math:`\gamma\lambda`.

    Equation: ``gae_kl_gradient``
    Sampler: :math:`y \sim \pi_\theta`.

    Args:
        logits, ref_logits: [states, vocab], tables of policy and reference.
        gamma, lam: as :func:`generalised_advantage`.
        critic: ``zero``; ``exact``, the mean discounted KL to go of each state; or ``scaled``, the
            undiscounted one times :math:`(1 - \gamma\lambda) / (\gamma (1 - \lambda))`.

    Returns:
        [states, vocab], which gradient *descent* on the KL follows.

    Raises:
        ValueError: on the scaled critic at ``gamma=0`` or ``lam=1``, where there is none.
    """
    check_choice("critic", critic, CRITICS)
    sequences = sequences.only(can_draw(logits.detach(), sequences))
    logp, ref_logp = (token_logp(x.detach(), sequences) for x in (logits, ref_logits))
    costs = kl_penalty(logp, ref_logp, estimator="k1", mask=sequences.mask)
    values = torch.zeros_like(costs)
    if critic != "zero":
        discount = gamma if critic == "exact" else 1.0
        table = state_average(reward_to_go(costs, gamma=discount), logits, sequences)
        values = table[sequences.states]
    if critic == "scaled":
        if gamma == 0.0 or lam == 1.0:
            raise ValueError(f"no critic is exact by scale at gamma={gamma!r}, lam={lam!r}")
        values = values * (1 - gamma * lam) / (gamma * (1 - lam))
    credit = generalised_advantage(costs, values, sequences.mask, gamma=gamma, lam=lam)
    return credit_moments(logits, sequences, credit).mean
