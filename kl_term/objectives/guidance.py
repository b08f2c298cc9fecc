r"""When, where and on whose tokens a term of the loss acts."""

from __future__ import annotations

from torch import Tensor

from kl_term.checks import check_float, check_same_shape, checked
from kl_term.shapes import Mask, Numbers, Values


@checked
def annealed(step: int, total: int, *, start: float, end: float) -> float:
    r"""A coefficient that moves linearly from one value to another.

    .. math:: \beta_n = \beta_0 + (\beta_N - \beta_0)\, \min(n / N, 1)

    Equation: ``annealed``
    Source: Xu et al. (2025), KDRL, annealing from imitation to reward.

    Args:
        step: updates done, at least 0.
        total: updates after which the end is reached, at least 1.
        start: value at step 0.
        end: value from step ``total`` on.
    """
    if step < 0 or total < 1:
        raise ValueError(f"need step >= 0 and total >= 1, got {step!r} and {total!r}")
    return start + (end - start) * min(step / total, 1.0)


@checked(nan="refused")
def low_reward_mask(rewards: Values, threshold: float) -> Tensor:
    r"""The completions that still need a teacher.

    .. math:: m_i = [\, R_i < c \,]

    A mask that depends on the sample changes the expected gradient: what is left is no longer the
    gradient of the KL from the teacher, but that of its share on the failing completions less that
    of the probability of failing. Descended, the second part alone is a push towards failing.

    Equation: ``low_reward_mask``
    Source: Xu et al. (2025), KDRL, reward-guided masking.

    Args:
        rewards: [...], one a completion.
        threshold: :math:`c`.

    Returns:
        [...], bool.
    """
    check_float("rewards", rewards)
    return rewards < threshold


@checked
def current_segment(mask: Mask, sampled_at: Numbers, iteration: int) -> Tensor:
    r"""The tokens of a partial rollout that the current policy sampled itself.

    .. math:: m'_{i,t} = m_{i,t}\, [\, n_{i,t} = n \,]

    A rollout cut at the token budget is kept and *continued* at the next iteration; its earlier
    segments serve as context and are masked out of the loss.

    Equation: ``current_segment``
    Source: Kimi Team (2025), Kimi k1.5, partial rollouts.

    Args:
        mask: [..., T], True = counted.
        sampled_at: [..., T], iteration at which each token was sampled.
        iteration: the current one.

    Returns:
        [..., T], bool.
    """
    check_same_shape("mask", mask, "sampled_at", sampled_at)
    return (mask != 0) & (sampled_at == iteration)
