r"""The expected gradient of any coefficient times the score, at one state.

A sampled term whose gradient is a *number times the score* is known once the number is: its
expected gradient is a weighted sum over the vocabulary.
"""

from __future__ import annotations

import torch

from kl_term.checks import checked, pair_of_floats
from kl_term.shapes import Logits


@checked
def expected_score(logits: Logits, weights: Logits) -> Logits:
    r"""Weighted sum of the scores of all tokens, by the logits of a softmax.

    .. math:: \sum_a w(a)\, \nabla_z \log \pi_\theta(a) = w - \pi_\theta \sum_a w(a)

    With :math:`w = \mu\, c` it is the expected gradient of a term with coefficient :math:`c` under
    a sampler :math:`\mu`. The entries sum to zero: a gradient on the logits of a softmax cannot
    lower every token.

    Equation: ``expected_score``

    Args:
        logits: [..., V], of the policy.
        weights: [..., V], probability of sampling a token times its coefficient.

    Returns:
        [..., V].
    """
    logits, weights = pair_of_floats("logits", logits, "weights", weights)
    return weights - torch.softmax(logits, dim=-1) * weights.sum(-1, keepdim=True)
