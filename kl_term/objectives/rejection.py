r"""Rejection sampling: of a group, imitate one completion and drop the others."""

from __future__ import annotations

import torch
from torch import Tensor

from kl_term.checks import check_same_shape, checked
from kl_term.shapes import Correct, Lengths


@checked(nan="refused")
def shortest_right(correct: Correct, lengths: Lengths) -> Tensor:
    r"""The shortest right completion of each group, the first of equals.

    .. math:: s_i = [\, i = i^* \,], \qquad
        i^* = \min\, \arg\min_{i\,:\,\text{correct}} |y_i|

    As an advantage of :func:`kl_term.objectives.losses.reinforce` it is supervised learning on
    the chosen completions: nothing is pushed down.

    Equation: ``shortest_right``
    Source: Kimi Team (2025), Kimi k1.5, shortest rejection sampling.
    Sampler: the policy; the group is its own.

    Args:
        correct: [..., G], bool.
        lengths: [..., G], tokens of each completion, any real dtype.

    Returns:
        [..., G], bool; True at most once in a group, nowhere if none is right.
    """
    if correct.dtype != torch.bool:
        raise ValueError(f"correct must be a boolean tensor, got {correct.dtype}")
    check_same_shape("correct", correct, "lengths", lengths)
    ranked = torch.where(correct, lengths.double(), torch.inf)
    chosen = torch.zeros_like(correct).scatter(-1, ranked.argmin(dim=-1, keepdim=True), True)
    return chosen & correct
