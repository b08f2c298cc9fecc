r"""Expected gradients of any credit scheme over enumerated sequences.

A policy-gradient estimator is a number beside each token's score: its *credit*. With every
sequence listed (:mod:`kl_term.kl.sequences`), the mean and the variance of the estimator are
finite sums for any credit whatever: discounted, bootstrapped, weighted or clipped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_term.checks import check_float, check_same_shape, checked
from kl_term.kl.enumeration import GradientMoments
from kl_term.kl.sequences import Sequences, sequence_probability
from kl_term.shapes import PerSequence, PerToken, Table


@checked
def sample_gradients(logits: Table, sequences: Sequences, credit: PerToken) -> Tensor:
    r"""The gradient that one sampled sequence contributes, for each sequence.

    .. math:: g(y) = \sum_t c_t(y)\, \nabla \log \pi_\theta(y_t | y_{<t})

    Equation: ``sample_gradients``
    Gradient: none flows through the credit: it is a number, as in every policy gradient.

    Args:
        logits: [states, vocab], the policy whose score is taken.
        credit: [N, T], what each token's score is multiplied with; masked positions are ignored.

    Returns:
        [N, states, vocab], by the logits table.
    """
    check_float("credit", credit)
    check_same_shape("sequences.mask", sequences.mask, "credit", credit)
    row, column = sequences.mask.nonzero(as_tuple=True)
    state = sequences.states[row, column]
    score = -logits.detach().softmax(-1)[state]
    score[torch.arange(len(row)), sequences.tokens[row, column]] += 1.0
    gradients = torch.zeros(len(sequences.mask), *logits.shape, dtype=logits.dtype)
    # A sequence never visits a prefix twice, so no two of its tokens write to the same row.
    gradients[row, state] = credit.detach()[row, column].unsqueeze(-1) * score
    return gradients


@checked
def credit_moments(
    logits: Table, sequences: Sequences, credit: PerToken, old_logits: Table | None = None
) -> GradientMoments:
    r"""Exact mean and variance of the sampled gradient of a credit scheme.

    .. math:: \mathbb{E}_{y \sim \pi_{\mathrm{old}}}[g(y)], \qquad
        \mathbb{E} \Vert g(y) \Vert^2 - \Vert \mathbb{E}\, g(y) \Vert^2

    Equation: ``credit_moments``
    Sampler: :math:`y \sim \pi_{\mathrm{old}}`; on-policy if ``old_logits`` is left out.

    Args:
        logits, sequences, credit: as :func:`sample_gradients`.
        old_logits: [states, vocab], the sampler.

    Returns:
        The mean [states, vocab] and the trace of the covariance of one sequence's gradient.
    """
    sampler = logits if old_logits is None else old_logits
    probability = sequence_probability(sampler.detach(), sequences)
    return weighted_moments(probability, sample_gradients(logits, sequences, credit))


@checked
def weighted_moments(probability: PerSequence, gradients: Tensor) -> GradientMoments:
    """Mean and trace of the covariance of gradients [N, ...] drawn with probability [N]."""
    flat = gradients.flatten(1)
    mean = probability @ flat
    spread = probability @ (flat - mean).square().sum(-1)
    return GradientMoments(mean.unflatten(0, gradients.shape[1:]), spread)


@checked
def state_average(
    values: PerToken, logits: Table, sequences: Sequences, *, by_action: bool = False
) -> Tensor:
    r"""Mean of a per-token quantity given the state it is met in: the exact critic of a return.

    .. math:: V(s) = \mathbb{E}_{y \sim \pi_\theta}[v_t(y) \mid y_{<t} = s], \qquad
        Q(s, a) = \mathbb{E}_{y \sim \pi_\theta}[v_t(y) \mid y_{<t} = s,\, y_t = a]

    Equation: ``state_average``

    Args:
        values: [N, T], for instance the reward to go of each token.
        logits: [states, vocab], the policy that samples; every token must be possible.
        by_action: give :math:`Q` instead of :math:`V`.

    Returns:
        [states], or [states, vocab] by action.
    """
    check_float("values", values)
    check_same_shape("sequences.mask", sequences.mask, "values", values)
    vocab = logits.shape[-1]
    mask = sequences.mask
    index = (sequences.states * vocab + sequences.tokens)[mask]
    probability = sequence_probability(logits.detach(), sequences)
    mass = probability.unsqueeze(-1).expand_as(values)[mask]
    sums = torch.zeros(2, sequences.num_states * vocab, dtype=values.dtype)
    sums.index_add_(1, index, torch.stack([mass * values[mask], mass]))
    sums = sums.unflatten(-1, (sequences.num_states, vocab))
    total, weight = sums if by_action else sums.sum(-1)
    return total / weight


@checked
def advantage_table(returns: PerToken, logits: Table, sequences: Sequences) -> Tensor:
    r"""Exact advantages of every action in every state.

    .. math:: A(s, a) = Q(s, a) - V(s)

    Equation: ``advantage_table``

    Args:
        returns: [N, T], the return from each token on.
        logits, sequences: as :func:`state_average`.

    Returns:
        [states, vocab]; its mean under the policy is zero in every state.
    """
    action_values = state_average(returns, logits, sequences, by_action=True)
    values = (logits.detach().softmax(-1) * action_values).sum(-1, keepdim=True)
    return action_values - values


@checked
def last_token_groups(sequences: Sequences, vocab_size: int) -> Tensor:
    """[states] long: the last token of each prefix, and ``vocab_size`` for the empty one.

    A policy that sees the last token only has one row of logits per group.
    """
    groups = torch.full((sequences.num_states,), vocab_size, dtype=torch.long)
    follows = sequences.mask[:, 1:]
    groups[sequences.states[:, 1:][follows]] = sequences.tokens[:, :-1][follows]
    return groups


@checked
def tie_states(gradient: Tensor, groups: Tensor) -> Tensor:
    r"""The gradient by shared parameters, from the gradient by the table.

    .. math:: \nabla_{\phi_g} = \sum_{s \in g} \nabla_{z_s} \qquad\text{if } z_s = \phi_{g(s)}

    Equation: ``tie_states``

    Args:
        gradient: [..., states, vocab].
        groups: [states] long, the parameter row that each state uses.

    Returns:
        [..., groups, vocab].
    """
    tied = torch.zeros(
        *gradient.shape[:-2], int(groups.max()) + 1, gradient.shape[-1], dtype=gradient.dtype
    )
    return tied.index_add(-2, groups, gradient)
