"""How many steps a reward at the end takes, and how many a teacher of every token."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kl_term.kl.enumeration import reverse_kl_gradient


def steps_to_success(length: int, vocab_size: int, *, dense: bool) -> int:
    """Exact-gradient steps from uniform until all ``length`` tokens are right nine times in ten.

    ``dense`` descends the reverse KL from a teacher that is right 99 times in 100; otherwise the
    success probability is ascended. Positions share a row of logits.
    """
    logits = torch.zeros(vocab_size, dtype=torch.float64)
    right = F.one_hot(torch.tensor(0), vocab_size)
    teacher = torch.where(right > 0, 0.99 ** (1 / length), 1 - 0.99 ** (1 / length)).double().log()
    for step in range(1_000_000):
        policy = logits.softmax(-1)
        success = policy[0] ** length
        if success >= 0.9:
            return step
        sparse = success * (right - policy)
        logits = logits + 0.5 * (-reverse_kl_gradient(logits, teacher) if dense else sparse)
    raise ValueError(f"length {length} takes over a million steps; shorten it")


def steps_ratio(length: int, *, vocab_size: int) -> float:
    """Steps on the sparse reward over steps on the dense teacher, at one learning rate."""
    sparse, dense = (steps_to_success(length, vocab_size, dense=d) for d in (False, True))
    return sparse / dense
