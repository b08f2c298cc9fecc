r"""What a token owes for the tokens that follow it: sums along a completion."""

from __future__ import annotations

from torch.nn import functional

from kl_term.checks import at_least_float32, check_float, checked
from kl_term.kl.packing import Packing
from kl_term.plain_checks import check_fraction
from kl_term.shapes import Tokens, Values


@checked
def reward_to_go(
    rewards: Values, *, gamma: float = 1.0, sequence_ids: Tokens | None = None
) -> Values:
    r"""Sum of the rewards from each position on, discounted.

    .. math:: G_t = \sum_{s \ge t} \gamma^{s-t} R_s

    Equation: ``reward_to_go``
    Source: Sutton and Barto (2018), section 3.3.

    Args:
        rewards: [..., T], one a position.
        gamma: the discount per position, in [0, 1].
        sequence_ids: [..., T] integers, where a row holds several sequences: see
            :mod:`kl_term.kl.packing`. Without them a row is one sequence.

    Returns:
        [..., T], in the unit of the rewards; exactly 0 past the last nonzero reward.
    """
    check_float("rewards", rewards)
    check_fraction("gamma", gamma)
    if sequence_ids is not None:
        packing = Packing(sequence_ids)
        return packing.pack(reward_to_go(packing.pad(rewards), gamma=gamma))
    total, span = at_least_float32(rewards), 1
    # invariant: total[t] holds the rewards t .. t + span - 1
    while span < rewards.shape[-1] and gamma**span > 0:
        total = total + gamma**span * functional.pad(total[..., span:], (0, span))
        span *= 2
    return total
