"""Random policies and references, which most chapters enumerate, and the groups they answer in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from kl_term.kl.credit import weighted_moments
from kl_term.kl.enumeration import GradientMoments, relative_error
from kl_term.kl.sequences import Sequences, enumerate_sequences, token_logp

#: Below this relative error two enumerated gradients are the same gradient.
SAME = 1e-9

#: Every answer of at most four of three tokens, the last of which ends it: what claims enumerate.
RAGGED = enumerate_sequences(3, 4, eos=2)
SPREAD = 1.2  #: standard deviation of the random logits there


class Policies(NamedTuple):
    """Pairs of categorical policies, one a row."""

    logits: Tensor  #: [N, V], the trained policy
    ref_logits: Tensor  #: [N, V], its reference


def normal_draws(shape: tuple[int, ...], *, seed: int) -> Tensor:
    """Standard normal draws in float64 from their own generator."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def random_policies(count: int, vocab_size: int, *, spread: float, seed: int) -> Policies:
    """Independent policies and references: Gaussian logits of standard deviation ``spread``."""
    return Policies(*(spread * normal_draws((2, count, vocab_size), seed=seed)))


def moved_logits(logits: Tensor, distance: float | Tensor, *, seed: int) -> Tensor:
    """Logits moved by ``distance`` along random directions of unit variance, each row its own.

    Distances [D, 1, 1] move [N, V] to [D, N, V].
    """
    return logits + distance * normal_draws(tuple(logits.shape), seed=seed)


def random_tables(
    sequences: Sequences, vocab_size: int, count: int, *, spread: float, seed: int
) -> Policies:
    """``count`` pairs of tabular autoregressive policies: logits [count, states, vocab]."""
    flat = random_policies(count, sequences.num_states * vocab_size, spread=spread, seed=seed)
    return Policies(*(x.unflatten(-1, (sequences.num_states, vocab_size)) for x in flat))


def ragged_tables(count: int, *, seed: int) -> Policies:
    """:func:`random_tables` on ``RAGGED``."""
    return random_tables(RAGGED, 3, count, spread=SPREAD, seed=seed)


class Chains(NamedTuple):
    """Policies that see the last token only, [N, V + 1, V]; the last row starts a sequence."""

    logits: Tensor
    ref_logits: Tensor
    old_logits: Tensor


def random_chains(
    vocab_size: int,
    count: int,
    *,
    drift: float,
    staleness: float = 0.0,
    stickiness: float = 0.0,
    seed: int,
) -> Chains:
    """References of unit-variance logits, policies ``drift`` away, samplers ``staleness`` away;
    ``stickiness`` (nats) favours repeating the last token."""
    base, moved, behind = normal_draws((3, count, vocab_size + 1, vocab_size), seed=seed)
    ref_logits = base + stickiness * torch.eye(vocab_size + 1, dtype=base.dtype)[:, :-1]
    logits = ref_logits + drift * moved
    return Chains(logits, ref_logits, logits + staleness * behind)


def by_token(values: Tensor, sequences: Sequences) -> Tensor:
    """[N, T]: at each token the number of its sequence."""
    return values.unsqueeze(-1).expand(sequences.mask.shape)


def log_ratios(logits: Tensor, ref_logits: Tensor, sequences: Sequences) -> Tensor:
    """[N, T]: log-ratio of two tables at each token of each sequence; of a reference, k1."""
    return token_logp(logits, sequences) - token_logp(ref_logits, sequences)


def flat_error(gradient: Tensor, exact: Tensor) -> float:
    """Relative error of a whole gradient, whatever its shape."""
    return relative_error(gradient.flatten(), exact.flatten()).item()


def group_moments(
    logits: Tensor, rewards: Tensor, group_size: int, advantage: Callable[[Tensor], Tensor]
) -> GradientMoments:
    """Exact mean and spread of a group's gradient: every one of the V^G groups, by probability.

    ``rewards`` is that of each answer; ``advantage`` turns a group's, the last axis, into credits.
    """
    vocab = len(logits)
    groups = all_groups(range(vocab), group_size)
    policy = logits.softmax(-1)
    scores = torch.eye(vocab, dtype=logits.dtype) - policy  # [V, V], row a: e_a - pi
    credit = advantage(rewards[groups]).unsqueeze(-1)
    gradients = (credit * scores[groups]).mean(dim=-2)
    return weighted_moments(policy[groups].prod(-1), gradients)


def all_groups(values: Iterable[float], size: int) -> Tensor:
    """[values^G, G]: every group of these values."""
    return torch.tensor(list(itertools.product(values, repeat=size)))


def measured(
    measure: Callable[..., Mapping[str, float | Tensor]], *tables: Iterable[Any]
) -> pd.DataFrame:
    """What ``measure`` finds for each row of the tables, such as each pair of policies."""
    return pd.DataFrame(
        {name: float(x) for name, x in measure(*row).items()} for row in zip(*tables, strict=True)
    )


def medians(
    rows: Iterable[Mapping[str, Any]], *keys: str, interpolation: str = "linear"
) -> pd.DataFrame:
    """Medians of the figures in rows that share these keys, in the order they first come."""
    groups = pd.DataFrame(rows).groupby(list(keys), sort=False)
    return groups.quantile(interpolation=interpolation).reset_index()


#: Pairs far from each other and from symmetric; and the same references nearby.
FAR = random_policies(200, 16, spread=1.5, seed=101)


@cache
def pairs() -> Policies:
    """300 policies far from their references, vocabulary of 16."""
    return random_policies(300, 16, spread=1.5, seed=4)


def random_returns(sequences: Sequences, *, seed: int) -> Tensor:
    """[N] returns of standard deviation one, one a sequence."""
    return normal_draws((len(sequences.mask),), seed=seed)


#: Of one descent step of a loss: log-probs of the sampled tokens under policy and reference ->
#: coefficient of the score
Coefficient = Callable[[Tensor, Tensor], Tensor]


def single_steps(logits: Tensor, weights: Tensor, *, step_size: float) -> Tensor:
    """[..., V, V] logits after one descent step on each single token, whose score has a weight."""
    score = torch.eye(logits.shape[-1], dtype=logits.dtype) - logits.softmax(-1).unsqueeze(-2)
    return logits.unsqueeze(-2) - step_size * weights.unsqueeze(-1) * score


def lowered(
    logits: Tensor, ref_logits: Tensor, coefficient: Coefficient, *, step_size: float
) -> Tensor:
    """Whether each token's own probability falls in one descent step on that token."""
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    moved = single_steps(logp, coefficient(logp, ref_logp), step_size=step_size).log_softmax(-1)
    return moved.diagonal(dim1=-2, dim2=-1) < logp
