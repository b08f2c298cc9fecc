r"""Expected gradients of any coefficient times the score, at one state and over whole sequences.

A sampled term whose gradient is a *number times the score* is known once the number is. The module
turns such numbers into exact gradients: at one state a weighted sum over the vocabulary, over
sequences one gradient a sequence, so that mean and covariance are sums over all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.checks import check_same_shape, pair_of_floats
from analysis.kl.enumeration import GradientMoments
from analysis.kl.sequences import Sequences, sequence_probability
from analysis.shapes import Logits, Values


def expected_score(logits: Logits, weights: Values) -> Logits:
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

    Raises:
        ValueError: if shapes differ or an input is not floating point.
    """
    logits, weights = pair_of_floats("logits", logits, "weights", weights)
    return weights - torch.softmax(logits, dim=-1) * weights.sum(-1, keepdim=True)


def sequence_scores(logits: Tensor, sequences: Sequences, weights: Tensor) -> Tensor:
    r"""Gradient of one weighted log-likelihood a sequence, by the logits table.

    .. math:: g(y) = \sum_t w_t(y)\, \nabla \log \pi_\theta(y_t | y_{<t})

    Equation: ``sequence_scores``

    Args:
        logits: [states, vocab], the table of the policy.
        sequences: from :func:`analysis.kl.sequences.enumerate_sequences`.
        weights: [N, T], one a token; ignored where masked.

    Returns:
        [N, states * vocab].

    Raises:
        ValueError: if ``weights`` does not have one entry a token.
    """
    check_same_shape("tokens", sequences.tokens, "weights", weights)
    policy = torch.softmax(logits, dim=-1)
    score = torch.nn.functional.one_hot(sequences.tokens, logits.shape[-1]).to(policy.dtype)
    score = score - policy[sequences.states]
    counted = torch.where(sequences.mask, weights, 0.0).unsqueeze(-1) * score
    gradient = policy.new_zeros(len(sequences.tokens), *logits.shape)
    index = sequences.states.unsqueeze(-1).expand_as(counted)
    return gradient.scatter_add(1, index, counted).flatten(1)


def sequence_moments(
    logits: Tensor, old_logits: Tensor, sequences: Sequences, weights: Tensor
) -> GradientMoments:
    r"""Exact mean and spread over :math:`y \sim \pi_{\mathrm{old}}` of :func:`sequence_scores`.

    .. math:: \mathbb{E}[g(y)], \qquad \mathbb{E}\Vert g(y) \Vert^2 - \Vert \mathbb{E}[g(y)] \Vert^2

    Equation: ``sequence_moments``
    Sampler: :math:`y \sim \pi_{\mathrm{old}}`.

    Args:
        logits, old_logits: [states, vocab], tables of policy and sampler.
        sequences, weights: as :func:`sequence_scores`.

    Returns:
        The mean [states * vocab] and the trace of one sequence's covariance, a scalar.
    """
    probability = sequence_probability(old_logits, sequences)
    gradients = sequence_scores(logits, sequences, weights)
    mean = probability @ gradients
    return GradientMoments(mean, probability @ gradients.square().sum(-1) - mean.square().sum())
