r"""The KL of sequences with the sum over the vocabulary done exactly.

A forward pass gives the whole next-token distribution, so the KL of *one* state costs no extra
sample. What remains random is which states are visited. Summing the exact per-state KL along a
sample is the Rao-Blackwell version of k1; its gradient needs the KL *to go* like that of k1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_term.checks import check_same_shape, checked
from kl_term.kl.credit import sample_gradients
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.enumeration import reverse_kl_gradient
from kl_term.kl.names import TOKEN_CREDITS
from kl_term.kl.sequences import Sequences
from kl_term.plain_checks import check_choice
from kl_term.shapes import Table


@checked
def visited_kl(logits: Table, ref_logits: Table, sequences: Sequences) -> Tensor:
    r"""Exact KL of each state that a sequence passes through.

    .. math:: K_t(y) = \mathrm{KL}\big(\pi_\theta(\cdot | y_{<t}) \Vert
        \pi_{\mathrm{ref}}(\cdot | y_{<t})\big)

    Its sum along a sample is an unbiased estimate of the sequence KL.

    Equation: ``visited_kl``
    Source: Amini et al. (2025).

    Returns:
        [N, T], nats; 0 where masked.
    """
    per_state = reverse_kl(logits, ref_logits)
    return torch.where(sequences.mask, per_state[sequences.states], 0.0)


@checked
def full_vocabulary_gradients(
    logits: Table, ref_logits: Table, sequences: Sequences, *, credit: str = "immediate"
) -> Tensor:
    r"""One sequence's gradient of the full-vocabulary KL, for each sequence.

    .. math:: \sum_t \nabla K_t \;\text{(immediate)}, \qquad
        \sum_t \nabla K_t + \sum_t \Big(\sum_{u > t} K_u\Big) \nabla \log \pi_\theta(y_t|y_{<t})
        \;\text{(to\_go)}

    ``immediate`` is the full-vocabulary loss of the trainers: its mean leaves out the future.
    ``to_go`` adds it back, and has the gradient of the sequence KL as its mean.

    Equation: ``full_vocabulary_gradients``
    Source: Amini et al. (2025) for ``to_go``.

    Args:
        logits, ref_logits: [states, vocab].
        credit: ``immediate`` or ``to_go``.

    Returns:
        [N, states, vocab].
    """
    check_choice("credit", credit, TOKEN_CREDITS)
    check_same_shape("logits", logits, "ref_logits", ref_logits)
    row, column = sequences.mask.nonzero(as_tuple=True)
    state = sequences.states[row, column]
    gradients = torch.zeros(len(sequences.mask), *logits.shape, dtype=logits.dtype)
    gradients[row, state] = reverse_kl_gradient(logits, ref_logits).detach()[state]
    if credit == "to_go":
        divergence = visited_kl(logits, ref_logits, sequences).detach()
        later = divergence.flip(-1).cumsum(-1).flip(-1) - divergence
        gradients = gradients + sample_gradients(logits, sequences, later)
    return gradients


@checked(nan="refused")
def markov_visits(logits: Table, length: int) -> Tensor:
    r"""Expected visits to each row of a policy that sees the last token only.

    .. math:: d(b) = \sum_{t \le T} P(\text{last token before } t = b), \qquad
        p_{t+1} = p_t\, \pi_\theta

    Equation: ``markov_visits``

    Args:
        logits: [V + 1, V], one row per last token; the last row starts the sequence.
        length: number of tokens T, at least 1.

    Returns:
        [V + 1], summing to T.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length!r}")
    policy = logits.softmax(-1)
    current = policy[-1]
    visits = torch.zeros_like(current)
    for _ in range(length - 1):
        visits = visits + current
        current = current @ policy[:-1]
    return torch.cat([visits, visits.new_ones(1)])


@checked
def markov_kl(
    logits: Table, ref_logits: Table, length: int, *, fixed_states: bool = False
) -> Tensor:
    r"""Exact sequence KL of two policies that see the last token only, in :math:`O(T V^2)`.

    .. math:: \mathrm{KL}(\pi_\theta \Vert \pi_{\mathrm{ref}}) = \sum_b d(b)\,
        \mathrm{KL}\big(\pi_\theta(\cdot|b) \Vert \pi_{\mathrm{ref}}(\cdot|b)\big)

    A sum over :math:`V^T` sequences is not always needed: it takes as many terms as there are
    *states*.

    Equation: ``markov_kl``

    Args:
        logits, ref_logits: [V + 1, V], as :func:`markov_visits`.
        length: number of tokens, at least 1.
        fixed_states: keep the visits out of the gradient, as every token-weighted loss does.

    Returns:
        A scalar, nats, with gradient; rows that are never visited add nothing to either.
    """
    check_same_shape("logits", logits, "ref_logits", ref_logits)
    visits = markov_visits(logits, length)
    met = visits != 0  # NaN too, which the result then shows
    weights = visits.detach() if fixed_states else visits
    return weights[met] @ reverse_kl(logits[met], ref_logits[met])
