r"""Exact expectations of a foreign loss: over tokens of a state, answers of a tree, and batches.

A state is a tree of depth one. The expected gradient of a loss that reads :math:`B` answers
together is a sum over every batch,

.. math:: \sum_{y_1 \dots y_B} \prod_i \pi_{\mathrm{old}}(y_i)\,
    \nabla \mathcal{L}(y_1, \dots, y_B)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from kl_term.audit.batches import Batch
from kl_term.audit.readings import Part
from kl_term.kl.enumeration import exact_kl_gradient
from kl_term.kl.scores import expected_score
from kl_term.kl.sequences import (
    Sequences,
    enumerate_sequences,
    sequence_probability,
    state_visits,
    token_logp,
)


@dataclass(frozen=True)
class Tree:
    """Every answer, under a policy, a reference and a sampler with one row of logits a prefix."""

    sequences: Sequences
    logits: Tensor  #: [states, V]
    ref_logits: Tensor  #: [states, V]
    old_logits: Tensor  #: [states, V]
    rewards: Tensor  #: [N], of each answer

    @cached_property
    def _fresh(self) -> Tree:
        return replace(self, old_logits=self.logits)

    def fresh(self) -> Tree:
        """The same tree, sampled by the policy."""
        return self._fresh

    @cached_property
    def _answers(self) -> Batch:
        s = self.sequences
        return Batch(
            logits=self.logits[s.states],
            ref_logits=self.ref_logits[s.states],
            old_logits=self.old_logits[s.states],
            tokens=s.tokens,
            mask=s.mask,
            advantages=self.rewards,
            rewards=self.rewards,
        )

    def answers(self) -> Batch:
        """All answers as one batch; padding holds the numbers of the first state."""
        return self._answers

    def answer_logp(self, logits: Tensor) -> Tensor:
        """[N], log-prob of each answer under a table of logits."""
        return token_logp(logits, self.sequences).sum(-1)


@lru_cache(maxsize=64)
def tree(
    vocab_size: int,
    length: int,
    *,
    ragged: bool,
    seed: int,
    distance: float = 0.7,
    staleness: float = 0.06,
) -> Tree:
    """A tree with random logits; token 0 ends an answer of a ragged one. The same one each time."""
    generator = torch.Generator().manual_seed(seed)
    sequences = enumerate_sequences(vocab_size, length, eos=0 if ragged and length > 1 else None)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = (sequences.num_states, vocab_size)
    logits = normal(*shape)
    return Tree(
        sequences,
        logits,
        logits + (distance * normal(*shape)).clamp(-1.0, 1.0),
        logits + (staleness * normal(*shape)).clamp(-0.08, 0.08),
        rewards=0.3 + torch.rand(len(sequences.mask), generator=generator, dtype=torch.float64),
    )


def state(vocab_size: int, *, seed: int) -> Tree:
    """One state: every answer is one token."""
    return tree(vocab_size, 1, ragged=False, seed=seed)


def expected_gradient(
    part: Callable[[Batch], Part],
    at: Tree,
    *,
    rows: int = 1,
    symmetric: bool = False,
    separable: bool = False,
) -> Tensor:
    """[states, V]: the mean gradient by the policy's table over every batch of ``rows`` answers.

    Args:
        part: of a loss, from a batch to value and gradient.
        at: where; the sampler draws.
        rows: answers a batch, drawn independently.
        symmetric: the order of the answers is known not to matter: each set is called once.
        separable: answers are known not to read each other: all of them are called at once.
    """
    probability = sequence_probability(at.old_logits, at.sequences)
    answers = at.answers()
    _ = answers.logp, answers.ref_logp, answers.old_logp  # once, for every batch of them
    count = len(probability)
    by_score = torch.zeros_like(at.logits)  # of the coefficient of each token's score
    by_logits = torch.zeros_like(at.logits)
    if separable:
        gradient = part(answers).gradient * count
        weights = probability.view(-1, *[1] * (gradient.ndim - 1)).expand_as(gradient)
        _add(by_logits, by_score, at.sequences.states, answers, weights * gradient)
        return by_logits + expected_score(at.logits, by_score)
    batches: Iterable[tuple[int, ...]]
    if symmetric:
        batches = itertools.combinations_with_replacement(range(count), rows)
    else:
        batches = itertools.product(range(count), repeat=rows)
    for chosen in batches:
        weight = probability[list(chosen)].prod() * (_orders(chosen) if symmetric else 1)
        if weight == 0:
            continue
        batch = answers.only(list(chosen))
        states = at.sequences.states[list(chosen)]
        _add(by_logits, by_score, states, batch, weight * part(batch).gradient)
    return by_logits + expected_score(at.logits, by_score)


def visited_gradient(at: Tree, *, direction: str) -> Tensor:
    """[states, V]: of a KL at the states that the sampler visits, held fixed."""
    visits = state_visits(at.old_logits, at.sequences).unsqueeze(-1)
    return visits * exact_kl_gradient(at.logits, at.ref_logits, direction=direction)


def _add(
    by_logits: Tensor, by_score: Tensor, states: Tensor, batch: Batch, gradient: Tensor
) -> None:
    """Add a weighted gradient by logits [B, T, V] or by log-probs [B, T] to its rows."""
    mask = batch.mask
    if gradient.ndim == 3:
        by_logits.index_put_((states[mask],), gradient[mask], accumulate=True)
    else:
        place = (states[mask], batch.tokens[mask])
        by_score.index_put_(place, gradient[mask], accumulate=True)


def _orders(chosen: tuple[int, ...]) -> int:
    """How many orders a set of answers has."""
    return len(set(itertools.permutations(chosen)))
