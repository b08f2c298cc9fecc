r"""Rewards that depend on the length of a completion.

None of them acts on its own: what a policy is taught is the *advantage*, and the group's
normalisation may rescale, cancel or invert a penalty. Rewards are per completion, on the last axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_term.checks import at_least_float32, check_float, check_same_shape, checked, default_float
from kl_term.plain_checks import check_not_negative
from kl_term.shapes import Correct, Lengths, Rewards


@checked
def length_penalty(rewards: Rewards, lengths: Lengths, *, weight: float) -> Rewards:
    r"""Reward minus a price per token.

    .. math:: R_i = R^{\mathrm{task}}_i - \lambda\, |y_i|

    Where all task rewards of a group are equal, the price drops out of
    :func:`kl_term.objectives.advantages.group_normalise` with ``eps=0``: any positive
    :math:`\lambda` gives the same advantages, up to floating point. Where they differ by 1, a
    length difference above :math:`1/\lambda` outweighs them.

    Equation: ``length_penalty``

    Args:
        rewards: [..., G], of the task.
        lengths: [..., G], tokens of each completion, any real dtype.
        weight: :math:`\lambda`, reward per token, at least 0.

    Returns:
        [..., G], in the unit of the rewards.
    """
    rewards, lengths = _rewards_and_lengths(rewards, lengths)
    check_not_negative("weight", weight)
    return rewards - weight * lengths


@checked
def soft_overlong(lengths: Lengths, *, max_length: int, buffer: int) -> Tensor:
    r"""A penalty that begins ``buffer`` tokens before the limit and reaches -1 at the limit.

    .. math:: R^{\mathrm{len}}(y) = \begin{cases}
        0 & |y| \le L_{\max} - L_{\mathrm{buf}} \\
        \dfrac{L_{\max} - L_{\mathrm{buf}} - |y|}{L_{\mathrm{buf}}}
            & L_{\max} - L_{\mathrm{buf}} < |y| \le L_{\max} \\
        -1 & |y| > L_{\max} \end{cases}

    Equation: ``soft_overlong``
    Source: Yu et al. (2025), DAPO, soft overlong punishment.

    Args:
        lengths: [...], tokens of each completion, any real dtype.
        max_length: :math:`L_{\max}`, the longest completion allowed.
        buffer: :math:`L_{\mathrm{buf}}`, between 1 and ``max_length``.

    Returns:
        [...], between -1 and 0, to be added to the reward; at least float32.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer must be in [1, max_length = {max_length}], got {buffer!r}")
    return ((max_length - buffer - _real(lengths)) / buffer).clamp(-1.0, 0.0)


@checked(nan="refused")
def relative_length_reward(correct: Correct, lengths: Lengths) -> Rewards:
    r"""The length reward of Kimi k1.5: relative to the group, and never a gift to a wrong answer.

    .. math:: R^{\mathrm{len}}_i = \begin{cases} \lambda_i & \text{correct} \\
        \min(0, \lambda_i) & \text{wrong} \end{cases}, \qquad
        \lambda_i = \tfrac12 - \frac{|y_i| - \min_j |y_j|}{\max_j |y_j| - \min_j |y_j|}

    Equation: ``relative_length_reward``
    Source: Kimi Team (2025), Kimi k1.5, length penalty.

    Args:
        correct: [..., G], bool.
        lengths: [..., G], tokens of each completion, any real dtype.

    Returns:
        [..., G], between -1/2 and 1/2; exactly 0 in a group of equal lengths.
    """
    if correct.dtype != torch.bool:
        raise ValueError(f"correct must be a boolean tensor, got {correct.dtype}")
    check_same_shape("correct", correct, "lengths", lengths)
    lengths = _real(lengths)
    shortest = lengths.amin(dim=-1, keepdim=True)
    spread = lengths.amax(dim=-1, keepdim=True) - shortest
    share = (lengths - shortest) / torch.where(spread == 0, 1.0, spread)
    reward = torch.where(spread == 0, 0.0, 0.5 - share)
    return torch.where(correct, reward, reward.clamp(max=0.0))


def _rewards_and_lengths(rewards: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    check_float("rewards", rewards)
    check_same_shape("rewards", rewards, "lengths", lengths)
    rewards = at_least_float32(rewards)
    return rewards, lengths.to(rewards.dtype)


def _real(lengths: Tensor) -> Tensor:
    if lengths.is_floating_point():
        return at_least_float32(lengths)
    return lengths.to(default_float())
