"""Chains of right and wrong steps, small enough to list every path, and scores of their steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from analysis.evidence.policies import by_token, moved_logits
from kl_term.kl.credit import state_average
from kl_term.kl.sequences import Sequences, enumerate_sequences


class Reasoning(NamedTuple):
    """A chain of right (1) and wrong (0) steps, solved when enough of them are right."""

    sequences: Sequences
    logits: Tensor  #: [states, vocab]
    outcome: Tensor  #: [N], 1 for a path that ends solved


def fixed_length_chain(
    steps: int, needed: int, *, right: float, spread: float = 0.0, seed: int = 0
) -> Reasoning:
    """Paths of ``steps`` steps, each right with probability ``right``, blurred by ``spread``."""
    sequences = enumerate_sequences(2, steps)
    odds = torch.tensor([1 - right, right], dtype=torch.float64).log()
    logits = moved_logits(odds.repeat(sequences.num_states, 1), spread, seed=seed)
    outcome = (sequences.tokens.sum(-1) >= needed).to(torch.float64)
    return Reasoning(sequences, logits, outcome)


def open_length_chain(max_steps: int, *, right: float, stop: float) -> Reasoning:
    """Paths that end on their own (token 2); solved if right steps outnumber the wrong ones."""
    sequences = enumerate_sequences(3, max_steps, eos=2)
    row = torch.tensor([(1 - stop) * (1 - right), (1 - stop) * right, stop], dtype=torch.float64)
    steps = torch.where(sequences.mask, sequences.tokens, 2)
    solved = (steps == 1).sum(-1) > (steps == 0).sum(-1)
    return Reasoning(sequences, row.log().expand(sequences.num_states, 3), solved.double())


def state_values(problem: Reasoning) -> Tensor:
    """[states]: probability of a solved path from each prefix, the score a perfect PRM gives."""
    return state_average(
        by_token(problem.outcome, problem.sequences), problem.logits, problem.sequences
    )


def prm_scores(problem: Reasoning, table: Tensor, final: Tensor) -> Tensor:
    """[N, T]: score after each step, from a table of prefixes and a score of each finished path."""
    states, mask = problem.sequences.states, problem.sequences.mask
    after = torch.cat([table[states[:, 1:]], final.unsqueeze(-1)], dim=-1)
    is_last = mask & ~functional.pad(mask[:, 1:], (0, 1))
    return torch.where(is_last, final.unsqueeze(-1), after)
