"""Bandits trained through a mixture of experts, whose sampler routes a little otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from kl_term.kl.importance import effective_sample_size
from kl_term.objectives.losses import policy_loss
from kl_term.objectives.routing import ExpertHead

EXPERTS, VOCAB, WIDTH = 8, 8, 12


ROUTINGS = ("replayed", "recomputed")


class Bandits(NamedTuple):
    """One bandit a seed: states, and the one token that is right in each."""

    hidden: Tensor  #: [S, N, D]
    right: Tensor  #: [S, N]


class Sampled(NamedTuple):
    """Tokens of one rollout and how they came about."""

    experts: Tensor  #: [S, N], those of the sampler
    tokens: Tensor  #: [S, N, G]
    old_logp: Tensor  #: [S, N, G]
    advantages: Tensor  #: [S, N, G]


def random_bandits(seeds: Sequence[int], states: int) -> tuple[Bandits, ExpertHead]:
    """Bandits with Gaussian states, and the heads they start from: parameters [S, ...]."""
    hidden, right, heads = [], [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        hidden.append(torch.randn(states, WIDTH, generator=generator, dtype=torch.float64))
        right.append(torch.randint(VOCAB, (states,), generator=generator))
        heads.append(random_head(EXPERTS, VOCAB, WIDTH, seed=seed))
    start = ExpertHead(*(torch.stack(parts) for parts in zip(*heads, strict=True)))
    return Bandits(torch.stack(hidden), torch.stack(right)), start


def state_logp(head: ExpertHead, hidden: Tensor, experts: Tensor) -> Tensor:
    """[S, N, V]: :func:`kl_term.objectives.routing.routed_logp` of every seed's head at once."""
    gate = (hidden @ head.router.mT).softmax(dim=-1).gather(-1, experts.unsqueeze(-1))
    of_seed = torch.arange(len(hidden)).unsqueeze(-1)
    logits = (head.experts[of_seed, experts] @ hidden.unsqueeze(-1)).squeeze(-1)
    return (gate * logits).log_softmax(dim=-1)


def own_experts(head: ExpertHead, hidden: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """[S, N]: the experts that the heads choose, with ``noise`` [S, E, D] added to their router."""
    return (hidden @ (head.router + noise).mT).argmax(dim=-1)


def expected_reward(head: ExpertHead, bandits: Bandits) -> Tensor:
    """[S]: chance of the right token, summed over the vocabulary, by the heads' own routing."""
    logp = state_logp(head, bandits.hidden, own_experts(head, bandits.hidden))
    return logp.exp().gather(-1, bandits.right.unsqueeze(-1)).mean(dim=(1, 2))


def sample_groups(
    head: ExpertHead, bandits: Bandits, group_size: int, noise: float, generator: torch.Generator
) -> Sampled:
    """A group of tokens in each state, from a router moved by Gaussian noise of that size."""
    shake = noise * torch.randn(head.router.shape, generator=generator, dtype=head.router.dtype)
    experts = own_experts(head, bandits.hidden, shake)
    logp = state_logp(head, bandits.hidden, experts)
    flat = torch.multinomial(
        logp.exp().flatten(0, 1), group_size, replacement=True, generator=generator
    )
    tokens = flat.view(*bandits.right.shape, group_size)
    rewards = (tokens == bandits.right.unsqueeze(-1)).to(logp.dtype)
    advantages = rewards - rewards.mean(-1, keepdim=True)
    return Sampled(experts, tokens, logp.gather(-1, tokens), advantages)


def train_bandits(
    routing: str,
    *,
    noise: float,
    seeds: Sequence[int],
    updates: int = 100,
    steps: int = 4,
    states: int = 32,
    group_size: int = 8,
    learning_rate: float = 0.02,
) -> pd.DataFrame:
    """Train every seed's bandit with the clipped surrogate, routing ``replayed`` or ``recomputed``.

    Unit Gaussians times ``noise`` are added to the sampler's router; both routings see the same
    draws, and take ``steps`` of Adam on each rollout. One row per seed and update, the routing in
    ``variant``: the exact ``reward`` before it, and of the *first* step on its rollout ``ess`` and
    ``clip_fraction`` of the ratios and ``flipped``, the share of states that the trainer would
    route otherwise than the sampler did.
    """
    bandits, start = random_bandits(seeds, states)
    head = ExpertHead(*(part.clone().requires_grad_() for part in start))
    optimizer = torch.optim.Adam(head, lr=learning_rate)
    generator = torch.Generator().manual_seed(seeds[0])
    rows = []
    for update in range(updates):
        with torch.no_grad():
            reward = expected_reward(head, bandits)
            drawn = sample_groups(head, bandits, group_size, noise, generator)
            flipped = own_experts(head, bandits.hidden) != drawn.experts
        for step in range(steps):
            experts = drawn.experts if routing == "replayed" else own_experts(head, bandits.hidden)
            logp = state_logp(head, bandits.hidden, experts).gather(-1, drawn.tokens)
            everything = torch.ones_like(drawn.tokens, dtype=torch.bool)
            loss = policy_loss(
                logp, old_logp=drawn.old_logp, advantages=drawn.advantages, mask=everything
            )
            if step == 0:
                ratios = (logp.detach().flatten(1), drawn.old_logp.flatten(1))
                measured = {
                    "ess": effective_sample_size(*ratios, everything.flatten(1)),
                    "clip_fraction": loss.clipped.double().mean(dim=(1, 2)),
                    "flipped": flipped.double().mean(dim=1),
                }
            optimizer.zero_grad()
            loss.loss.backward()
            optimizer.step()
        rows.append(pd.DataFrame({"seed": seeds, "update": update, "reward": reward, **measured}))
    return pd.concat(rows, ignore_index=True).assign(variant=routing, noise=noise, beta=0.0)


def random_head(experts: int, vocab_size: int, width: int, *, seed: int) -> ExpertHead:
    """A router and experts with Gaussian parameters."""
    generator = torch.Generator().manual_seed(seed)
    return ExpertHead(
        torch.randn(experts, width, generator=generator, dtype=torch.float64) / width**0.5,
        2 * torch.randn(experts, vocab_size, width, generator=generator, dtype=torch.float64),
    )
