"""The attached prefix ratio on trees and along Markov chains: tables and curves of chapter 6."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional

from analysis.experiments.chapters.gradients import Policies
from analysis.experiments.chapters.sequences import flat_error, quantile
from analysis.kl.credit import weighted_moments
from analysis.kl.divergences import reverse_kl
from analysis.kl.enumeration import GradientMoments, reverse_kl_gradient
from analysis.kl.estimators import k1, k2, k3
from analysis.kl.full_vocabulary import markov_kl, visited_kl
from analysis.kl.importance import importance_ratio
from analysis.kl.prefix import markov_second_moments
from analysis.kl.returns import reward_to_go
from analysis.kl.sequences import (
    Sequences,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
)
from analysis.kl.term import KLTerm

#: A per-token loss [N, T] of log-probs under policy, reference and sampler, the mask, and the KL
#: of each token's state.
TokenLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _prefix(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    return importance_ratio(logp, old_logp, mask, level="prefix")


def _term(**fields: str) -> TokenLoss:
    term = KLTerm(**fields)
    return lambda p, r, o, m, _: term.loss(p, r, old_logp=o, mask=m)


#: What is compared, by cost and ratio. The first three and the fifth have the gradient of the
#: sequence KL, as have the two ways to put k1 in the reward.
LOSSES: dict[tuple[str, str], TokenLoss] = {
    ("k3", "prefix, attached"): _term(estimator="k3", weighting="attached", ratio="prefix"),
    ("k1", "prefix, attached"): _term(estimator="k1", weighting="attached", ratio="prefix"),
    ("full vocabulary", "tokens before, attached"): lambda p, _, o, m, state_kl: (
        _prefix(p, o, m) / importance_ratio(p, o, m) * state_kl
    ),
    ("k2", "prefix, attached"): _term(estimator="k2", weighting="attached", ratio="prefix"),
    ("growth of k2", "prefix, detached"): lambda p, r, o, m, _: (
        _prefix(p, o, m).detach() * _growth(k2(p.cumsum(-1), r.cumsum(-1)))
    ),
    ("k2", "prefix, detached"): _term(estimator="k2", weighting="detached", ratio="prefix"),
    ("k3", "token, attached"): _term(estimator="k3", weighting="attached"),
    ("k3", "token, gradient of prefix"): lambda p, r, o, m, _: (
        importance_ratio(p, o, m).detach() * _prefix(p, p.detach(), m) * k3(p, r)
    ),
    ("k1 reward to go", "prefix"): lambda p, r, o, m, _: (
        reward_to_go(_prefix(p, o, m) * k1(p, r)).detach() * p
    ),
    ("k1 reward to go", "whole"): lambda p, r, o, m, _: (
        (importance_ratio(p, o, m, level="sequence") * reward_to_go(k1(p, r))).detach() * p
    ),
}
#: The way to the same gradient that the noise of the others is compared with.
YARDSTICK = ("k1 reward to go", "prefix")


def _growth(running: Tensor) -> Tensor:
    return running.diff(prepend=torch.zeros_like(running[:, :1]))


def loss_moments(
    pair: Policies, old_logits: Tensor, sequences: Sequences, loss: TokenLoss
) -> GradientMoments:
    """Mean and variance of one sequence's gradient of a loss summed over tokens, by autograd."""
    with torch.enable_grad():
        leaf = pair.logits.detach().requires_grad_(True)
        logp, ref_logp, old_logp = (
            token_logp(x, sequences) for x in (leaf, pair.ref_logits, old_logits)
        )
        state_kl = visited_kl(leaf, pair.ref_logits, sequences)
        per_token = loss(logp, ref_logp, old_logp, sequences.mask, state_kl)
        per_sequence = torch.where(sequences.mask, per_token, 0.0).sum(-1)
        each = torch.eye(len(per_sequence), dtype=per_sequence.dtype)
        (gradients,) = torch.autograd.grad(per_sequence, leaf, each, is_grads_batched=True)
    return weighted_moments(sequence_probability(old_logits, sequences), gradients)


def prefix_table(tables: Policies, samplers: Tensor, sequences: Sequences) -> pd.DataFrame:
    """What the mean of each loss misses of the sequence KL's gradient, and its noise.

    On-policy (``fresh``) and under the given samplers (``stale``). ``error`` is a median over the
    pairs; ``noise``, ``low`` and ``high`` are the median, the smallest and the largest variance
    of one sequence's gradient, in units of that of k1 in the reward to go with prefix weights.
    """
    found: dict[tuple[str, str], dict[str, float]] = {key: {} for key in LOSSES}
    for name, olds in (("fresh", tables.logits), ("stale", samplers)):
        errors: dict[tuple[str, str], list[float]] = {key: [] for key in LOSSES}
        noise: dict[tuple[str, str], list[float]] = {key: [] for key in LOSSES}
        for logits, ref_logits, old in zip(*tables, olds, strict=True):
            pair = Policies(logits, ref_logits)
            exact = sequence_kl_gradient(*pair, sequences)
            moments = {key: loss_moments(pair, old, sequences, x) for key, x in LOSSES.items()}
            for key, (mean, spread) in moments.items():
                errors[key].append(flat_error(mean, exact))
                noise[key].append((spread / moments[YARDSTICK].trace_var).item())
        for key, row in found.items():
            row[f"error_{name}"] = quantile(errors[key])
            row[f"noise_{name}"] = quantile(noise[key])
            row[f"low_{name}"], row[f"high_{name}"] = min(noise[key]), max(noise[key])
    return pd.DataFrame(
        {"cost": cost, "weight": weight, **row} for (cost, weight), row in found.items()
    )


def cap_table(
    tables: Policies, samplers: Tensor, sequences: Sequences, caps: Iterable[float]
) -> pd.DataFrame:
    """Bias and noise of k3 under a capped prefix ratio, attached, by the way it is capped.

    ``clamp`` differentiates the cap, so that a capped token's ratio is a constant; ``rescaled``
    caps the value and keeps the gradient of the ratio's logarithm. ``capped`` is the mean share of
    tokens over the cap. Medians over the pairs, in norms of the exact gradient.
    """
    rows = []
    for cap in caps:
        kinds: dict[str, TokenLoss] = {
            "clamp": lambda p, r, o, m, _, cap=cap: _prefix(p, o, m).clamp(max=cap) * k3(p, r),
            "rescaled": lambda p, r, o, m, _, cap=cap: _rescaled(_prefix(p, o, m), cap) * k3(p, r),
        }
        row: dict[str, object] = {
            "cap": cap,
            "capped": _share_over(tables, samplers, sequences, cap),
        }
        for kind, loss in kinds.items():
            bias, noise = [], []
            for logits, ref_logits, old in zip(*tables, samplers, strict=True):
                pair = Policies(logits, ref_logits)
                exact = sequence_kl_gradient(*pair, sequences)
                mean, spread = loss_moments(pair, old, sequences, loss)
                bias.append(flat_error(mean, exact))
                noise.append((spread.sqrt() / exact.norm()).item())
            row |= {f"bias_{kind}": quantile(bias), f"noise_{kind}": quantile(noise)}
        rows.append(row)
    return pd.DataFrame(rows)


def _rescaled(ratio: Tensor, cap: float) -> Tensor:
    return ratio * (ratio.clamp(max=cap) / ratio).detach()


def _share_over(tables: Policies, samplers: Tensor, sequences: Sequences, cap: float) -> float:
    shares = []
    for logits, old in zip(tables.logits, samplers, strict=True):
        logp, old_logp = token_logp(logits, sequences), token_logp(old, sequences)
        over = (_prefix(logp, old_logp, sequences.mask) > cap) & sequences.mask
        weight = sequence_probability(old, sequences)
        shares.append(
            (weight @ over.double().sum(-1) / (weight @ sequences.mask.double().sum(-1))).item()
        )
    return quantile(shares)


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
