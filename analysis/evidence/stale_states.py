"""States whose samples are of an older policy, and what a KL merged into the ratio does there."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from analysis.evidence.policies import random_policies
from kl_term.objectives.merged import merged_loss

NO_CLIP = {"epsilon_low": 1.0, "epsilon_high": math.inf}


class StaleStates(NamedTuple):
    """Independent states, one a row: policy, reference, sampler and advantages."""

    logits: Tensor  #: [N, V], the trained policy
    ref_logits: Tensor  #: [N, V], its reference
    old_logits: Tensor  #: [N, V], the policy that sampled
    advantages: Tensor  #: [N, V], of each token: mean 0, variance 1 under the sampler


def spread(values: Tensor, probability: Tensor) -> Tensor:
    """[..., 1]: standard deviation under the probabilities given."""
    mean = (probability * values).sum(-1, keepdim=True)
    return (probability * (values - mean).square()).sum(-1, keepdim=True).sqrt()


def standardised(values: Tensor, probability: Tensor) -> Tensor:
    """Values minus their mean over their standard deviation, under the probabilities given."""
    mean = (probability * values).sum(-1, keepdim=True)
    return (values - mean) / spread(values, probability)


def stale_states(
    count: int, vocab_size: int, distance: float, *, seed: int, along_advantage: bool = False
) -> StaleStates:
    """Samplers near random references, and policies that have moved on by ``distance``, at
    random or along the advantage."""
    ref_logits, shift = random_policies(count, vocab_size, spread=1.0, seed=seed)
    old_logits = ref_logits + shift
    rewards, direction = random_policies(count, vocab_size, spread=1.0, seed=seed + 1)
    advantages = standardised(rewards, old_logits.softmax(-1))
    moved = old_logits + distance * (advantages if along_advantage else direction)
    return StaleStates(moved, ref_logits, old_logits, advantages)


def merged_gradient(states: StaleStates, **options) -> Tensor:
    """[N, V]: expected *ascent* direction of the merged objective by autograd; ``options`` of
    :func:`kl_term.objectives.merged.merged_loss`."""
    logits, ref_logits, old_logits, advantages = states
    ref_logp, old_logp = ref_logits.log_softmax(-1), old_logits.log_softmax(-1)
    everywhere = torch.ones_like(logits, dtype=torch.bool)

    def objective(at: Tensor) -> Tensor:
        loss = merged_loss(
            at.log_softmax(-1), ref_logp, old_logp, advantages, everywhere, **options
        )
        return -(old_logp.exp() * loss).sum()

    return grad(objective)(logits)


def merged_kl_gradient(states: StaleStates, *, reading: str, penalty: str = "k1") -> Tensor:
    """[N, V]: the KL part of the merged objective without clip, as a descent direction."""
    alone = states._replace(advantages=torch.zeros_like(states.advantages))
    return -merged_gradient(alone, beta=1.0, reading=reading, penalty=penalty, **NO_CLIP)
