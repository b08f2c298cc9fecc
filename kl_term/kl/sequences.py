r"""Exact expected gradients over whole sequences, by enumerating every one of them.

A tabular autoregressive policy has one row of logits per prefix. With a small vocabulary and a
short horizon every sequence can be listed, ragged ones that stop at an end token included, so
the gradient of the sequence KL and the expectation of every token- or sequence-level surrogate
are finite sums. Gradients are by the logits table ``[states, vocab]``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kl_term.checks import check_same_shape, checked
from kl_term.kl.enumeration import exact_kl_gradient
from kl_term.kl.estimators import TOKEN_ESTIMATORS
from kl_term.kl.importance import importance_ratio
from kl_term.kl.names import CREDITS, DIRECTIONS, LEVELS, PLACEMENTS
from kl_term.kl.term import KLTerm
from kl_term.plain_checks import check_choice
from kl_term.shapes import PerToken, Table


class Sequences(NamedTuple):
    """Every sequence of a small vocabulary, one a row; padding is masked and holds token 0."""

    tokens: Tensor  #: [N, T] long, the token taken
    states: Tensor  #: [N, T] long, the row of the logits table (the prefix) it was taken in
    mask: Tensor  #: [N, T] bool, True = counted
    num_states: int  #: rows of the logits table: prefixes at which a token is drawn

    def only(self, kept: Tensor) -> Sequences:
        """Some of the sequences [N] bool, on the same states."""
        return Sequences(self.tokens[kept], self.states[kept], self.mask[kept], self.num_states)


@checked
def enumerate_sequences(vocab_size: int, max_length: int, *, eos: int | None = None) -> Sequences:
    """All sequences of exactly ``max_length`` tokens, or, with ``eos``, of at most that many.

    Args:
        vocab_size: number of tokens, at least 2.
        max_length: horizon, at least 1.
        eos: the token that ends a sequence (it is counted), or ``None`` for fixed length.

    Returns:
        :class:`Sequences`, prefixes numbered breadth first with the empty one as state 0.

    Raises:
        ValueError: if a size is too small or ``eos`` is not a token.
    """
    if vocab_size < 2 or max_length < 1:
        raise ValueError(
            f"need vocab_size >= 2 and max_length >= 1, got {vocab_size} and {max_length}"
        )
    if eos is not None and not 0 <= eos < vocab_size:
        raise ValueError(f"eos must be a token in [0, {vocab_size}), got {eos}")
    live: list[tuple[list[int], list[int]]] = [([], [])]  # tokens so far, states they came from
    complete: list[tuple[list[int], list[int]]] = []
    num_states = 0
    for position in range(max_length):
        grown: list[tuple[list[int], list[int]]] = []
        for tokens, states in live:
            state, num_states = num_states, num_states + 1
            for token in range(vocab_size):
                child = ([*tokens, token], [*states, state])
                ends = token == eos or position == max_length - 1
                (complete if ends else grown).append(child)
        live = grown
    lengths = torch.tensor([len(tokens) for tokens, _ in complete])
    return Sequences(
        tokens=_padded([tokens for tokens, _ in complete], max_length),
        states=_padded([states for _, states in complete], max_length),
        mask=torch.arange(max_length) < lengths.unsqueeze(-1),
        num_states=num_states,
    )


@checked
def token_logp(logits: Table, sequences: Sequences) -> Tensor:
    """Log-prob [N, T] of each token of each sequence under a logits table [states, vocab]."""
    logp = torch.log_softmax(logits, dim=-1)[sequences.states, sequences.tokens]
    return torch.where(sequences.mask, logp, 0.0)


@checked
def sequence_probability(logits: Table, sequences: Sequences) -> Tensor:
    """Probability [N] of each sequence; they sum to one."""
    return token_logp(logits, sequences).sum(-1).exp()


@checked(nan="refused")
def can_draw(logits: Table, sequences: Sequences) -> Tensor:
    """[N] bool: sequences that a policy does not forbid; the others add nothing to its means."""
    return _drawable(logits, sequences)


def _drawable(logits: Tensor, sequences: Sequences) -> Tensor:
    return token_logp(logits, sequences).sum(-1) != -torch.inf  # NaN stays visible


@checked
def state_visits(logits: Table, sequences: Sequences) -> Tensor:
    r"""Probability [states] that a rollout passes through each prefix.

    .. math:: d^{\pi}(s) = \sum_{y \ni s} \pi(y)

    Equation: ``state_visits``
    """
    probability = sequence_probability(logits, sequences)
    per_token = probability.unsqueeze(-1).expand_as(sequences.mask)
    visits = torch.zeros(sequences.num_states, dtype=probability.dtype)
    return visits.index_add(0, sequences.states[sequences.mask], per_token[sequences.mask])


@checked
def sequence_kl(
    logits: Table, ref_logits: Table, sequences: Sequences, *, direction: str = "reverse"
) -> Tensor:
    r"""KL divergence of two autoregressive policies over whole sequences (nats, a scalar).

    .. math:: \mathrm{KL}(\pi_\theta \Vert \pi_{\mathrm{ref}})
        = \sum_y \pi_\theta(y) \sum_t l_t(y)
        = \sum_s d^{\pi_\theta}(s)\,
          \mathrm{KL}\big(\pi_\theta(\cdot|s) \Vert \pi_{\mathrm{ref}}(\cdot|s)\big)

    ``inf`` where the policy allows what the reference forbids; a token that the policy forbids
    (``-inf`` in its table) adds nothing.

    Equation: ``sequence_kl``
    """
    check_choice("direction", direction, DIRECTIONS)
    of, other = (logits, ref_logits) if direction == "reverse" else (ref_logits, logits)
    sequences = sequences.only(_drawable(of, sequences))
    of_logp, other_logp = token_logp(of, sequences), token_logp(other, sequences)
    return (of_logp.sum(-1).exp() * (of_logp - other_logp).sum(-1)).sum()


@checked
def sequence_kl_gradient(
    logits: Table, ref_logits: Table, sequences: Sequences, *, direction: str = "reverse"
) -> Tensor:
    r"""Exact gradient [states, vocab] of the sequence KL, by autograd through the full sum.

    .. math:: \nabla \mathrm{KL}(\pi_\theta \Vert \pi_{\mathrm{ref}})
        = \mathbb{E}_{y \sim \pi_\theta} \sum_t
          \Big(\sum_{u \ge t} l_u\Big) \nabla \log \pi_\theta(y_t | y_{<t})

    Moving the policy at one state changes which states are visited later: the log-ratios *to go*
    are part of the gradient.

    Equation: ``sequence_kl_gradient``
    Source: Tang and Munos (2025).
    """
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_(True)
        divergence = sequence_kl(leaf, ref_logits.detach(), sequences, direction=direction)
        (gradient,) = torch.autograd.grad(divergence, leaf)
    return gradient


@checked
def visited_kl_gradient(
    logits: Table,
    ref_logits: Table,
    sequences: Sequences,
    old_logits: Table | None = None,
    *,
    direction: str = "reverse",
) -> Tensor:
    r"""Gradient of the mean per-token KL with the visited states held fixed.

    .. math:: \sum_s d^{\pi_{\mathrm{old}}}(s)\,
        \nabla \mathrm{KL}\big(\pi_\theta(\cdot|s) \Vert \pi_{\mathrm{ref}}(\cdot|s)\big)

    It is what a loss with token ratios can reach at best: the sequence KL's gradient without the
    effect of today's token on tomorrow's states, which the attached prefix ratio brings in
    (:func:`kl_term.kl.prefix.prefix_coefficients`).

    Equation: ``visited_kl_gradient``
    """
    visits = state_visits(logits if old_logits is None else old_logits, sequences)
    per_state = exact_kl_gradient(logits, ref_logits, direction=direction)
    visits = visits.detach().unsqueeze(-1)
    return torch.where(visits == 0, 0.0, visits * per_state)


@checked(nan="refused")
def expected_sequence_gradient(
    logits: Table,
    ref_logits: Table,
    sequences: Sequences,
    old_logits: Table | None = None,
    *,
    estimator: str,
    level: str = "token",
    placement: str = "loss",
    weighting: str = "none",
    ratio: str = "token",
    credit: str = "to_go",
    token_weights: PerToken | None = None,
) -> Tensor:
    r"""Exact expected gradient [states, vocab] of a sampled KL term over whole sequences.

    .. math:: \text{loss:} \quad \mathbb{E}_{y \sim \pi_{\mathrm{old}}}
        \nabla \sum_t \omega_t\, \kappa_t, \qquad
        \text{reward:} \quad \mathbb{E}_{y \sim \pi_{\mathrm{old}}}
        \sum_t \omega_t\, w_t\, K_t\, \nabla \log \pi_\theta(y_t | y_{<t})

    with :math:`\kappa_t` the loss and :math:`K_t` the penalty of :class:`kl_term.kl.term.KLTerm`,
    the code that trainers run, and :math:`\omega_t` the weight of a token in the aggregate.

    Sequences that the sampler forbids add nothing. What the policy forbids and the sampler draws
    has weight zero and adds nothing, and is infinite without a weight. (As the policy's probability
    tends to zero so does every weighted term, but for k3 and k4, whose ratio :math:`r` grows as
    fast as the weight falls: detached, or attached to earlier tokens by their common ratio.)

    Equation: ``expected_sequence_gradient``
    Sampler: :math:`y \sim \pi_{\mathrm{old}}`; on-policy if ``old_logits`` is left out.

    Args:
        logits, ref_logits, old_logits: [states, vocab] tables of policy, reference, sampler.
        estimator, level, placement, credit: as in :class:`kl_term.kl.term.KLTerm`; in the reward
            the penalty is that of the sampler.
        weighting, ratio: of the loss as there; of the reward, the weight :math:`w` of the policy
            gradient. At level ``sequence`` it is the whole sequence's.
        token_weights: [N, T], a function of the mask alone such as ``1 / |o|``; by default 1, the
            sum over tokens.

    Returns:
        The gradient that *descent* on the KL term follows.

    Raises:
        ValueError: on a choice that :class:`kl_term.kl.term.KLTerm` refuses.
    """
    check_choice("estimator", estimator, (*TOKEN_ESTIMATORS, "cross_entropy"))
    check_choice("level", level, LEVELS)
    check_choice("placement", placement, PLACEMENTS)
    check_choice("credit", credit, CREDITS)
    check_same_shape("logits", logits, "ref_logits", ref_logits)
    old_logits = logits if old_logits is None else old_logits
    drawn = _drawable(old_logits, sequences)
    sequences = sequences.only(drawn)
    in_loss = placement == "loss"
    fields: dict[str, Any] = {"estimator": estimator, "placement": placement, "level": level}
    if in_loss:
        fields |= {"weighting": weighting, "ratio": ratio}
    elif level == "token":
        fields["credit"] = credit
    term = KLTerm(**fields)
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_(True)
        logp = token_logp(leaf, sequences)
        ref_logp = token_logp(ref_logits.detach(), sequences)
        old_logp = token_logp(old_logits.detach(), sequences)
        probability, mask = old_logp.sum(-1).exp(), sequences.mask
        weight = torch.ones_like(logp)
        if weighting != "none":
            kind = "sequence" if level == "sequence" else ratio
            weight = importance_ratio(logp, old_logp, mask, level=kind).detach()
        if in_loss:
            terms = term.loss(logp, ref_logp, old_logp=old_logp, mask=mask & (weight != 0))
        else:
            owed = term.penalty(old_logp, ref_logp, mask=mask)
            terms = torch.where(weight == 0, 0.0, weight * owed) * logp
        if token_weights is not None:
            terms = terms * token_weights[drawn]
        expected = (probability.unsqueeze(-1) * torch.where(mask, terms, 0.0)).sum()
        (gradient,) = torch.autograd.grad(expected, leaf)
    return gradient


def _padded(rows: list[list[int]], length: int) -> Tensor:
    return torch.tensor([row + [0] * (length - len(row)) for row in rows])
