"""Sound runs of known policies: each token depends on the one before it, and on the prompt.

Completions are ragged, tokens of a completion and completions of a prompt are alike, and the KL is
summed over the vocabulary at each visited state: what a mean and its interval can be held to.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from kl_term.diagnosis.schema import Floats

#: Ends a completion; the other tokens are states.
END = 0


class Population(NamedTuple):
    """Where prompts and policies are drawn from. Sizes of logits in nats."""

    kl: float = 0.01  #: to the reference, nats a token, at the first update
    vocabulary: int = 16
    longest: int = 48  #: tokens of a completion
    prompt: float = 0.5  #: what a prompt adds to the logits of all policies
    uneven: float = 0.25  #: standard deviation of the logarithm of a prompt's distance
    move: float = 0.03  #: of the logits, at each further update on one rollout


class Sample(NamedTuple):
    """Completions, [C, T], NaN behind their end; by update where an axis stands before."""

    logp: Floats  #: [K, C, T], of the policies trained on one rollout; the first one sampled it
    ref_logp: Floats  #: [C, T]
    mask: np.ndarray  #: [C, T]
    prompt: np.ndarray  #: [C]
    token: np.ndarray  #: [C, T]
    entropy: Floats  #: [K, C, T]
    k1: Floats  #: [K, C, T]: expectation of log policy/reference under the first policy
    k3: Floats  #: [K, C, T]: that of k3


def sample(
    population: Population,
    seed: int,
    *,
    prompts: int,
    group: int,
    updates: int = 1,
    top_p: float = 1.0,
) -> Sample:
    """Completions of fresh prompts, under policies that do not depend on what is drawn.

    Args:
        population: what prompts and policies are drawn from.
        seed: of this sample; the population is one for all seeds.
        prompts: how many.
        group: completions of each.
        updates: policies that see each completion, the first of them the sampler.
        top_p: mass of the sampler's likeliest tokens that is drawn from; log-probs are the
            policy's, as trainers score them.
    """
    generator = np.random.default_rng([seed, 7])
    tables = _tables(population, generator, prompts, updates)
    count = prompts * group
    prompt = np.repeat(np.arange(prompts), group)
    shape = (count, population.longest)
    token, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
    state, alive = generator.integers(1, population.vocabulary, count), np.ones(count, bool)
    drawn = tables.policies[0] if top_p == 1 else _cut(tables.policies[0], top_p)
    rising = np.cumsum(np.exp(drawn), axis=-1)
    states = np.zeros(shape, np.int64)
    for time in range(population.longest):
        states[:, time], mask[:, time] = state, alive
        level = generator.random(count)[:, None] * rising[prompt, state, -1:]
        token[:, time] = np.minimum((rising[prompt, state] < level).sum(-1), drawn.shape[-1] - 1)
        alive = alive & (token[:, time] != END)
        state = np.where(token[:, time] == END, 1, token[:, time])
    at = prompt[:, None], states
    hidden = np.where(mask, 0.0, np.nan)
    return Sample(
        logp=np.stack([policy[*at, token] for policy in tables.policies]) + hidden,
        ref_logp=tables.reference[*at, token] + hidden,
        mask=mask,
        prompt=prompt,
        token=token,
        entropy=np.stack([-(np.exp(p) * p).sum(-1)[at] for p in tables.policies]) + hidden,
        k1=np.stack([_expected(tables, policy, 1)[at] for policy in tables.policies]) + hidden,
        k3=np.stack([_expected(tables, policy, 3)[at] for policy in tables.policies]) + hidden,
    )


@cache
def truth(
    population: Population, updates: int = 1, *, completions: int = 100_000
) -> dict[str, float]:
    """Mean of k1 and k3 over the tokens of all prompts, from exact expectations at each state."""
    sums, tokens = np.zeros(2), 0
    for part in range(completions // 2000):
        drawn = sample(population, 10**6 + part, prompts=1000, group=2, updates=updates)
        sums += np.nansum(drawn.k1), np.nansum(drawn.k3)
        tokens += drawn.mask.sum() * updates
    k1, k3 = sums / tokens
    return {"k1": float(k1), "k3": float(k3)}


class _Tables(NamedTuple):
    policies: list[Floats]  #: each [prompts, V, V]: log-probs of the next token after each
    reference: Floats


def _tables(
    population: Population, generator: np.random.Generator, prompts: int, updates: int
) -> _Tables:
    base, away, moves = _shared(population.vocabulary)
    own = population.prompt * generator.standard_normal((prompts, 1, population.vocabulary))
    own[..., END] = 0.0
    far = np.exp(population.uneven * generator.standard_normal((prompts, 1, 1)))
    logits = base + own
    policies = [
        _log_softmax(logits + update * population.move * moves) for update in range(updates)
    ]
    return _Tables(policies, _log_softmax(logits - _size(population) * far * away))


@lru_cache(maxsize=8)
def _shared(vocabulary: int) -> tuple[Floats, Floats, Floats]:
    """What all prompts have in common: the policy, the way from the reference, and that on."""
    generator = np.random.default_rng(20261126)
    base, away, moves = generator.standard_normal((3, vocabulary, vocabulary))
    base[:, END] = -0.5 + 0.7 * base[:, END]
    return base, away, moves


@lru_cache(maxsize=64)
def _size(population: Population) -> float:
    """By how much logits differ from the reference's, so that the KL is the population's."""
    base, away, _ = _shared(population.vocabulary)
    generator = np.random.default_rng(3)
    far = np.exp(population.uneven * generator.standard_normal((2000, 1, 1)))
    policy = _log_softmax(base)
    low, high = 0.0, 400.0
    for _ in range(60):
        size = (low + high) / 2
        reference = _log_softmax(base - size * far * away)
        kl = (np.exp(policy) * (policy - reference)).sum(-1).mean()
        low, high = (size, high) if kl < population.kl else (low, size)
    return low


def _expected(tables: _Tables, policy: Floats, estimator: int) -> Floats:
    """[prompts, V]: expectation of an estimator of a policy under the one that samples."""
    ratio = policy - tables.reference
    values = ratio if estimator == 1 else np.expm1(-ratio) + ratio
    return (np.exp(tables.policies[0]) * values).sum(-1)


def _cut(policy: Floats, top_p: float) -> Floats:
    """Log-probs with the least likely tokens beyond a mass of ``top_p`` at minus infinity."""
    order = np.argsort(-policy, axis=-1)
    ranked = np.take_along_axis(policy, order, -1)
    before = np.cumsum(np.exp(ranked), -1) - np.exp(ranked)
    kept = np.where(before < top_p, ranked, -np.inf)
    found = np.empty_like(policy)
    np.put_along_axis(found, order, kept, -1)
    return found


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
