"""The attached prefix ratio on trees, every sequence listed: tables of chapter 6."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pandas as pd
import torch
from torch import Tensor

from analysis.experiments.chapters.gradients import Policies, random_tables
from analysis.experiments.chapters.sequences import flat_error, quantile
from analysis.experiments.chapters.stale_sequences import moved_tables
from analysis.kl.credit import sample_gradients, tie_states, weighted_moments
from analysis.kl.enumeration import GradientMoments
from analysis.kl.estimators import k1, k2, k3
from analysis.kl.full_vocabulary import visited_kl
from analysis.kl.importance import importance_ratio
from analysis.kl.prefix import prefix_coefficients
from analysis.kl.returns import reward_to_go
from analysis.kl.sequences import (
    Sequences,
    enumerate_sequences,
    sequence_kl,
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
    ("k3", "whole, attached"): _term(estimator="k3", weighting="attached", ratio="sequence"),
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
BASELINE = ("k1 reward to go", "prefix")


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
                noise[key].append((spread / moments[BASELINE].trace_var).item())
        for key, row in found.items():
            row[f"error_{name}"] = quantile(errors[key])
            row[f"noise_{name}"] = quantile(noise[key])
            row[f"low_{name}"], row[f"high_{name}"] = min(noise[key]), max(noise[key])
    return pd.DataFrame(
        {"cost": cost, "weight": weight, **row} for (cost, weight), row in found.items()
    )


def tree_table(
    trees: Iterable[tuple[int, int, int | None]],
    count: int,
    *,
    distances: Sequence[float],
    staleness: float,
    seed: int,
) -> pd.DataFrame:
    """Variance of k3 under the prefix ratio (``k3``) and of the full product (``whole``).

    In units of per-decision k1 in the reward to go, on stale samples: median, smallest and largest
    over ``count`` random pairs on each tree, which is given by its vocabulary, longest sequence and
    end token. Distances of policy and reference and the staleness are in nats per logit.
    """
    rows = []
    for vocab_size, longest, eos in trees:
        sequences = enumerate_sequences(vocab_size, longest, eos=eos)
        step, ref_logits = random_tables(sequences, vocab_size, count, spread=1.0, seed=seed)
        for distance in distances:
            logits = ref_logits + distance * step
            samplers = moved_tables(logits, staleness, seed=seed + 1)
            found = torch.stack(
                [
                    relative_noise(*x, sequences)
                    for x in zip(logits, ref_logits, samplers, strict=True)
                ]
            )
            row = {"vocabulary": vocab_size, "sequences": len(sequences.mask), "distance": distance}
            for name, values in zip(("k3", "whole"), found.unbind(-1), strict=True):
                row[f"{name}_noise"] = values.median().item()
                row[f"{name}_low"], row[f"{name}_high"] = values.min().item(), values.max().item()
            rows.append(row)
    return pd.DataFrame(rows)


def relative_noise(
    logits: Tensor,
    ref_logits: Tensor,
    old_logits: Tensor,
    sequences: Sequences,
    shared: Tensor | None = None,
) -> Tensor:
    """[2]: variances of the k3 prefix loss and of the full product over per-decision weights'.

    ``shared`` [states] is the row of logits that each state uses; by default each has its own.
    """
    rows = torch.arange(len(logits)) if shared is None else shared
    probability = sequence_probability(old_logits, sequences)
    logp, ref_logp, old_logp = (token_logp(x, sequences) for x in (logits, ref_logits, old_logits))
    mask, log_ratio = sequences.mask, logp - ref_logp
    yardstick, k3_loss, whole = (
        weighted_moments(
            probability, tie_states(sample_gradients(logits, sequences, credit), rows)
        ).trace_var
        for credit in (
            reward_to_go(_prefix(logp, old_logp, mask) * log_ratio),
            prefix_coefficients(logp, ref_logp, old_logp, mask),
            importance_ratio(logp, old_logp, mask, level="sequence") * reward_to_go(log_ratio),
        )
    )
    return torch.stack([k3_loss, whole]) / yardstick


def noise_counterexamples() -> dict[str, float]:
    """Where the k3 prefix loss is noisier than k1 in the reward though the policies are near.

    ``shared_two`` and ``shared_four``: times the variance for answers of at most two and four
    tokens, one row for all states (go on or end), a ten thousandth of a nat per logit apart.
    ``small_kl_times``: a row for every prefix, two tokens, ``small_kl`` nats in all.
    """
    found = {}
    row = torch.tensor([0.8, 0.2], dtype=torch.float64).log()
    ref_row = row - 1e-4 * torch.tensor([1.0, 0.0])
    for name, longest in (("shared_two", 2), ("shared_four", 4)):
        sequences = enumerate_sequences(2, longest, eos=1)
        tables = (x.expand(sequences.num_states, 2) for x in (row, ref_row, row))
        one = torch.zeros(sequences.num_states, dtype=torch.long)
        found[name] = relative_noise(*tables, sequences, one)[0].item()
    two = enumerate_sequences(2, 2)
    first = torch.tensor([[0.1, 0.105], [0.99, 0.94], [0.99, 0.99]], dtype=torch.float64)
    logits, ref_logits = torch.stack([first, 1 - first], dim=-1).log().unbind(1)
    found["small_kl"] = sequence_kl(logits, ref_logits, two).item()
    found["small_kl_times"] = relative_noise(logits, ref_logits, logits, two)[0].item()
    return found


def cap_table(
    tables: Policies, samplers: Tensor, sequences: Sequences, caps: Iterable[float]
) -> pd.DataFrame:
    """Bias and noise of k3 under a capped prefix ratio, attached, by the way it is capped.

    ``clamp`` differentiates the cap, so that a capped token's ratio is a constant; ``rescaled``
    caps the value and keeps the gradient of the ratio's logarithm. ``capped`` is the mean share of
    tokens over the cap. Medians over the pairs, in norms of the exact gradient; ``kept_is_closer``
    is the share of pairs on which ``rescaled`` has the smaller bias.
    """
    rows = []
    for cap in caps:
        kinds: dict[str, TokenLoss] = {
            "clamp": lambda p, r, o, m, _, cap=cap: _prefix(p, o, m).clamp(max=cap) * k3(p, r),
            "rescaled": lambda p, r, o, m, _, cap=cap: _capped(p, o, m, cap) * k3(p, r),
        }
        row: dict[str, object] = {
            "cap": cap,
            "capped": _share_over(tables, samplers, sequences, cap),
        }
        biases = {}
        for kind, loss in kinds.items():
            bias, noise = biases.setdefault(kind, []), []
            for logits, ref_logits, old in zip(*tables, samplers, strict=True):
                pair = Policies(logits, ref_logits)
                exact = sequence_kl_gradient(*pair, sequences)
                mean, spread = loss_moments(pair, old, sequences, loss)
                bias.append(flat_error(mean, exact))
                noise.append((spread.sqrt() / exact.norm()).item())
            row |= {f"bias_{kind}": quantile(bias), f"noise_{kind}": quantile(noise)}
        closer = (torch.tensor(biases["rescaled"]) < torch.tensor(biases["clamp"])).double()
        rows.append(row | {"kept_is_closer": closer.mean().item()})
    return pd.DataFrame(rows)


def _capped(logp: Tensor, old_logp: Tensor, mask: Tensor, cap: float) -> Tensor:
    """The prefix ratio's value, capped, with the whole gradient of its logarithm; never NaN."""
    return _prefix(logp, old_logp, mask).detach().clamp(max=cap) * _prefix(
        logp, logp.detach(), mask
    )


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
