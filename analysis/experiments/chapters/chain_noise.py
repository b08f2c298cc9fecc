"""Noise of the ways to the sequence KL's gradient along Markov chains, to any length: chapter 6."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional

from analysis.kl.divergences import reverse_kl
from analysis.kl.enumeration import reverse_kl_gradient
from analysis.kl.full_vocabulary import markov_kl
from analysis.kl.prefix import markov_second_moments


class Chains(NamedTuple):
    """Policies that see the last token only, [N, V + 1, V]; the last row starts a sequence."""

    logits: Tensor
    ref_logits: Tensor
    old_logits: Tensor


#: Ways to the gradient of the sequence KL, and one more that needs stale samples to differ.
WAYS = ("k1 reward to go", "k1 prefix", "k3 prefix", "full vocabulary prefix")
PRODUCT = "k1 reward to go, whole product"


def random_chains(
    vocab_size: int, count: int, *, drift: float, staleness: float, seed: int
) -> Chains:
    """References of unit-variance logits, policies ``drift`` away, samplers ``staleness`` away."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, count, vocab_size + 1, vocab_size)
    ref_logits, moved, behind = torch.randn(shape, generator=generator, dtype=torch.float64)
    logits = ref_logits + drift * moved
    return Chains(logits, ref_logits, logits + staleness * behind)


def chain_samples(
    chains: Chains, lengths: Sequence[int], *, baseline: bool = False
) -> dict[str, Tensor]:
    """[lengths, N] sequences at which noise equals the exact gradient, for each way to get it.

    With ``baseline`` the mean KL to go at its position is taken off each token's coefficient, as
    the other answers of a group estimate it; that needs the length, so only the largest is done.
    """
    logits, ref_logits, old_logits = chains
    longest = max(lengths)
    policy = logits.softmax(-1)
    log_ratio = logits.log_softmax(-1) - ref_logits.log_softmax(-1)
    score = torch.eye(policy.shape[-1], dtype=policy.dtype) - policy.unsqueeze(-2)
    ratio = policy / old_logits.softmax(-1)
    state_kl = reverse_kl(logits, ref_logits).unsqueeze(-1)
    k3_cost = torch.expm1(-log_ratio) + log_ratio
    k1_own = log_ratio.unsqueeze(-1) * score
    full_own = reverse_kl_gradient(logits, ref_logits).unsqueeze(-2) / ratio.unsqueeze(-1)
    own = torch.stack([k1_own, k1_own + score, k1_own, full_own])
    future = torch.stack([log_ratio, log_ratio, k3_cost, state_kl / ratio])
    wide = (x.expand(len(future), *x.shape) for x in (logits, old_logits))
    off = product_off = None
    if baseline:
        lengths = [longest]
        owed, own_kl = _mean_kls(policy, state_kl.squeeze(-1), longest)
        off = torch.stack([owed, owed, owed, owed - own_kl], dim=1)  # the vocabulary's own is known
        off = off.unsqueeze(-1).expand(*off.shape, policy.shape[-2])
        product_off = off[:, 0]
    second = markov_second_moments(*wide, own, future, longest, baseline=off)
    moments = dict(zip(WAYS, second.unbind(1), strict=True))
    moments[PRODUCT] = markov_second_moments(
        logits, old_logits, k1_own, log_ratio, longest, weight="sequence", baseline=product_off
    )
    signal = torch.stack([_chain_signal(logits, ref_logits, length) for length in lengths])
    return {way: x[torch.tensor(lengths) - 1] / signal - 1 for way, x in moments.items()}


def _mean_kls(policy: Tensor, state_kl: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """[length, N] each: the mean KL to go at a position, and the mean KL of its own token."""
    to_go = [torch.zeros_like(state_kl)]
    for _ in range(length):
        to_go.append(state_kl + (policy @ to_go[-1][..., :-1, None]).squeeze(-1))
    visits = torch.zeros_like(state_kl)
    visits[..., -1] = 1.0
    owed, own = [], []
    for left in reversed(to_go[1:]):
        owed.append((visits * left).sum(-1))
        own.append((visits * state_kl).sum(-1))
        visits = functional.pad((visits.unsqueeze(-1) * policy).sum(-2), (0, 1))
    return torch.stack(owed), torch.stack(own)


def _chain_signal(logits: Tensor, ref_logits: Tensor, length: int) -> Tensor:
    """[N] squared norms of the gradients of the sequence KL."""
    leaf = logits.clone().requires_grad_(True)
    values = [markov_kl(*pair, length) for pair in zip(leaf, ref_logits, strict=True)]
    (gradient,) = torch.autograd.grad(torch.stack(values).sum(), leaf)
    return gradient.square().sum((-1, -2))


def noise_curves(
    lengths: Sequence[int],
    vocab_size: int,
    count: int,
    *,
    drift: float,
    staleness: Iterable[float],
    seed: int,
) -> pd.DataFrame:
    """Noise of each way to the sequence KL's gradient against the length: medians over chains."""
    rows = []
    for behind in staleness:
        chains = random_chains(vocab_size, count, drift=drift, staleness=behind, seed=seed)
        for way, samples in chain_samples(chains, lengths).items():
            middle = samples.median(-1).values.tolist()
            rows += [
                {"staleness": behind, "way": way, "length": length, "samples": value}
                for length, value in zip(lengths, middle, strict=True)
            ]
    return pd.DataFrame(rows)


def baseline_table(
    length: int, vocab_size: int, count: int, *, drifts: Iterable[float], seed: int
) -> pd.DataFrame:
    """Noise on-policy without and with the mean KL to go at a position as baseline.

    Medians over chains; ``kl`` is that of a whole sequence (nats), by dynamic programming.
    """
    drifts = list(drifts)
    each = [
        random_chains(vocab_size, count, drift=drift, staleness=0.0, seed=seed) for drift in drifts
    ]
    chains = Chains(*(torch.cat(parts) for parts in zip(*each, strict=True)))
    kl = torch.stack([markov_kl(*pair, length) for pair in zip(*chains[:2], strict=True)])
    bare, centred = (chain_samples(chains, [length], baseline=x) for x in (False, True))
    columns = {
        name: x.unflatten(-1, (len(drifts), count)).median(-1).values.flatten().tolist()
        for name, x in {
            "kl": kl.expand(len(WAYS), -1),
            "bare": torch.cat([bare[way] for way in WAYS]),
            "baseline": torch.cat([centred[way] for way in WAYS]),
        }.items()
    }
    ways = [way for way in WAYS for _ in drifts]
    return pd.DataFrame({"way": ways, **columns}).sort_values("kl", kind="stable")
