r"""Which groups and which completions are worth a gradient.

A group of equal rewards has advantage zero and is wasted compute; a completion that loops is wasted
tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_term.checks import at_least_float32, check_float, check_probabilities, checked
from kl_term.shapes import Rewards, Tokens, Values


@checked(nan="refused")
def informative_groups(rewards: Rewards) -> Tensor:
    r"""Groups whose rewards are not all equal: what dynamic sampling keeps.

    .. math:: \mathrm{keep} = \big[\max_i R_i > \min_i R_i\big]

    The other groups have advantage exactly zero, so dropping them changes no sum of policy
    gradients; it changes what the sum is divided by, and a KL loss loses their share.

    Equation: ``informative_groups``
    Source: Yu et al. (2025), DAPO, dynamic sampling.

    Args:
        rewards: [..., G].

    Returns:
        [...], bool.

    Raises:
        ValueError: if the rewards have no group axis.
    """
    check_float("rewards", rewards)
    if rewards.ndim == 0:
        raise ValueError("rewards must have a group axis: shape [..., G], got a scalar")
    return rewards.amax(dim=-1) > rewards.amin(dim=-1)


@checked
def kept_fraction(success: Values, group_size: int) -> Tensor:
    r"""Expected share of the groups of a prompt that dynamic sampling keeps, for binary rewards.

    .. math:: \Pr(\mathrm{keep}) = 1 - p^G - (1 - p)^G

    Equation: ``kept_fraction``

    Args:
        success: [...], probability :math:`p` that a completion is right, in [0, 1].
        group_size: :math:`G`, at least 1.

    Returns:
        [...], a probability.
    """
    check_probabilities("success", success)
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size!r}")
    success = at_least_float32(success)
    rarer = torch.minimum(success, 1 - success)
    kept = -torch.expm1(group_size * torch.log1p(-rarer)) - rarer**group_size
    return kept.clamp(min=0.0)


@checked
def repeats(tokens: Tokens, *, period: int, times: int) -> Tensor:
    r"""Where a completion has just repeated a block of tokens ``times`` times over.

    .. math:: \mathrm{repeats}_t = \big[\, y_s = y_{s - P}
        \ \text{for all } t - (k - 1) P < s \le t \,\big]

    for any period up to :math:`P` and :math:`k` copies. Truncate at the first true position.

    Equation: ``repeats``

    Args:
        tokens: [..., T], token ids.
        period: the longest block looked for, at least 1.
        times: how many copies in a row count as a loop, at least 2.

    Returns:
        [..., T], bool.
    """
    if period < 1 or times < 2:
        raise ValueError(f"need period >= 1 and times >= 2, got {period!r} and {times!r}")
    looping = torch.zeros_like(tokens, dtype=torch.bool)
    for block in range(1, period + 1):
        run = block * (times - 1)
        if run + block > tokens.shape[-1]:
            break
        equal = tokens[..., block:] == tokens[..., :-block]
        looping[..., block + run - 1 :] |= equal.unfold(-1, run, 1).all(dim=-1)
    return looping
