r"""From rewards to advantages: what one completion is worth beside the others of its group.

A group holds the rewards of several completions of one prompt, on the last axis. A group of equal
rewards teaches nothing and gets advantage exactly 0 in every dtype. Advantages are constants of
the update: they carry no gradient. Credit *within* a completion (process rewards, the KL in the
reward) lives in :mod:`kl_term.objectives.credit` and is importable from here too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_term.checks import at_least_float32, check_float, checked
from kl_term.lazy import lookup
from kl_term.objectives.groups import deviations, standardise
from kl_term.shapes import Rewards

#: Credit within a completion, and its module; loaded when asked for.
_HOMES = {"fold_kl": "credit", "process_supervision": "credit", "reward_to_go": "credit"}
__all__ = ["group_centre", "group_normalise", "leave_one_out", *_HOMES]
__getattr__ = lookup("kl_term.objectives", _HOMES)


@checked
def group_normalise(
    rewards: Rewards,
    *,
    ddof: int = 1,
    eps: float = 1e-4,
    std_min: float | None = None,
    std_max: float | None = None,
) -> Rewards:
    r"""Rewards standardised within their group: the advantage of GRPO.

    .. math:: A_i = \frac{R_i - \mathrm{mean}(R)}
        {\mathrm{clip}(\mathrm{std}(R), \sigma_{\min}, \sigma_{\max}) + \epsilon}

    Without ``eps`` and bounds the scale of the rewards drops out: rewards that differ by rounding
    get advantages as large as rewards that differ by right and wrong. Without ``std_max``
    :math:`|A_i| \le \sqrt{G - 1}` with ``ddof=0`` and :math:`|A_i| \le (G - 1)/\sqrt{G}` with
    ``ddof=1``.

    Equation: ``group_normalise``
    Source: Shao et al. (2024), DeepSeekMath, outcome supervision; the clip is equation 41 of Liu,
        Liu and Liu, "Rethinking KL Divergence in RLHF" (March 2025).

    Args:
        rewards: [..., G], one a completion.
        ddof: 1 for the sample standard deviation (torch's default), 0 for the population's.
        eps: added to the standard deviation, at least 0.
        std_min: lower bound of the standard deviation, if any.
        std_max: upper bound of the standard deviation, if any.

    Returns:
        [..., G], dimensionless, without gradient; exactly 0 for a group of equal rewards.

    Raises:
        ValueError: on a group of one.
    """
    everyone = _whole_group(rewards)
    advantages = standardise(
        rewards, everyone, ddof=ddof, eps=eps, std_min=std_min, std_max=std_max
    )
    return _like(rewards, advantages)


@checked
def group_centre(rewards: Rewards) -> Rewards:
    r"""Rewards minus the mean of their group: the advantage of Dr. GRPO.

    .. math:: A_i = R_i - \mathrm{mean}(R)

    Equation: ``group_centre``
    Source: Liu et al. (2025), Dr. GRPO.

    Args:
        rewards: [..., G], one a completion.

    Returns:
        [..., G], in the unit of the rewards, without gradient; exactly 0 for equal rewards.

    Raises:
        ValueError: on a group of one.
    """
    return _like(rewards, deviations(rewards, _whole_group(rewards)))


@checked
def leave_one_out(rewards: Rewards) -> Rewards:
    r"""Rewards minus the mean of the *others*: the advantage of RLOO.

    .. math:: A_i = R_i - \frac{1}{G - 1} \sum_{j \ne i} R_j
        = \frac{G}{G - 1} \big(R_i - \mathrm{mean}(R)\big)

    The baseline does not depend on completion :math:`i`, so the policy gradient stays unbiased;
    that of :func:`group_centre` is smaller by the constant factor :math:`(G - 1)/G`.

    Equation: ``leave_one_out``
    Source: Kool et al. (2019); Ahmadian et al. (2024).

    Args, Returns, Raises: as :func:`group_centre`.
    """
    centred = deviations(rewards, _whole_group(rewards))
    size = rewards.shape[-1]
    return _like(rewards, centred * (size / (size - 1)))


def _whole_group(rewards: Tensor) -> Tensor:
    """A mask that counts every reward, after a check that there are at least two."""
    check_float("rewards", rewards)
    if rewards.ndim == 0 or rewards.shape[-1] < 2:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)}: a group (last axis) needs at least two "
            "completions, because an advantage compares them"
        )
    return torch.ones_like(rewards, dtype=torch.bool)


def _like(rewards: Tensor, advantages: Tensor) -> Tensor:
    """Back from float64 to the dtype of the rewards, at least float32."""
    return advantages.to(at_least_float32(rewards).dtype)
