"""Credit within a sequence, enumerated: the tables and curves of the first half of chapter 6."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pandas as pd
import torch
from torch import Tensor

from analysis.experiments.chapters.gradients import Policies
from analysis.kl.credit import credit_moments, tie_states, weighted_moments
from analysis.kl.enumeration import GradientMoments, cosine, relative_error
from analysis.kl.full_vocabulary import full_vocabulary_gradients, markov_kl
from analysis.kl.sequences import (
    Sequences,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
)
from analysis.objectives.credit import reward_to_go
from analysis.objectives.gae import CRITICS, gae_kl_gradient

EXACT = 1e-10  #: relative error below which two enumerated gradients are the same
SPREAD = 1.2  #: standard deviation of the random logits of a decision


def flat_error(gradient: Tensor, exact: Tensor, groups: Tensor | None = None) -> float:
    """Relative error of a whole gradient, by shared parameters if groups of states are given."""
    if groups is not None:
        gradient, exact = tie_states(gradient, groups), tie_states(exact, groups)
    return relative_error(gradient.flatten(), exact.flatten()).item()


def quantile(values: Iterable[float], q: float = 0.5) -> float:
    """The median, or another quantile, of plain numbers."""
    return torch.tensor(list(values), dtype=torch.float64).quantile(q).item()


def gae_curves(
    tables: Policies, sequences: Sequences, lams: Iterable[float], gammas: Iterable[float]
) -> pd.DataFrame:
    """Error of k1 in the reward through GAE against the gradient of the sequence KL.

    Returns a tidy frame: gamma, critic, lam and the 10th, 50th and 90th percentile over the pairs.
    The scaled critic has no row where there is none.
    """
    exact = [sequence_kl_gradient(*pair, sequences) for pair in zip(*tables, strict=True)]
    rows = []
    for gamma, critic, lam in itertools.product(gammas, CRITICS, lams):
        if critic == "scaled" and (gamma == 0.0 or lam == 1.0):
            continue
        options = {"gamma": gamma, "critic": critic, "lam": lam}
        errors = [
            flat_error(gae_kl_gradient(*pair, sequences, **options), referee)
            for pair, referee in zip(zip(*tables, strict=True), exact, strict=True)
        ]
        rows.append({**options, **_band(errors)})
    return pd.DataFrame(rows)


def length_curves(
    lengths: Iterable[int],
    vocab_size: int,
    count: int,
    *,
    drift: float,
    stickiness: float = 0.0,
    seed: int,
) -> pd.DataFrame:
    """Error and cosine of the best token-weighted loss as sequences grow, by dynamic programming.

    The policies see the last token only and share their parameters over positions, so that the
    gradients of long sequences are exact too. The policy is its reference moved by ``drift``;
    ``stickiness`` (nats) favours repeating the last token, so that a state is left late.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (2, count, vocab_size + 1, vocab_size)
    base, direction = torch.randn(shape, generator=generator, dtype=torch.float64)
    ref_logits = base + stickiness * torch.eye(vocab_size + 1, dtype=base.dtype)[:, :-1]
    rows = []
    for length in lengths:
        errors, angles = [], []
        for logits, ref in zip(ref_logits + drift * direction, ref_logits, strict=True):
            exact, per_token = (
                _markov_gradient(logits, ref, length, fixed_states=fixed) for fixed in (False, True)
            )
            errors.append(flat_error(per_token, exact))
            angles.append(cosine(per_token.flatten(), exact.flatten()).item())
        row = {"stickiness": stickiness, "length": length, **_band(errors)}
        rows.append({**row, "cosine": quantile(angles)})
    return pd.DataFrame(rows)


def sampling_table(tables: Policies, sequences: Sequences) -> pd.DataFrame:
    """Four estimators of a KL gradient: what their mean misses and how noisy one sequence is.

    ``error`` is that of the mean against the gradient of the sequence KL; ``samples`` is the
    number of sequences at which signal equals noise. Medians over the pairs.
    """
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for logits, ref_logits in zip(*tables, strict=True):
        exact = sequence_kl_gradient(logits, ref_logits, sequences)
        for key, moments in _estimators(logits, ref_logits, sequences).items():
            samples = moments.trace_var / moments.mean.square().sum()
            found.setdefault(key, []).append((flat_error(moments.mean, exact), samples.item()))
    return pd.DataFrame(
        {
            "vocabulary": vocabulary,
            "credit": credit,
            "error": quantile(error for error, _ in values),
            "samples": quantile(samples for _, samples in values),
        }
        for (vocabulary, credit), values in found.items()
    )


def _estimators(
    logits: Tensor, ref_logits: Tensor, sequences: Sequences
) -> dict[tuple[str, str], GradientMoments]:
    """Moments by vocabulary (sampled or full) and credit (immediate or to go)."""
    costs = token_logp(logits, sequences) - token_logp(ref_logits, sequences)
    probability = sequence_probability(logits, sequences)
    moments = {
        ("sampled", "immediate"): credit_moments(logits, sequences, costs),
        ("sampled", "to_go"): credit_moments(logits, sequences, reward_to_go(costs)),
    }
    for credit in ("immediate", "to_go"):
        gradients = full_vocabulary_gradients(logits, ref_logits, sequences, credit=credit)
        moments["full", credit] = weighted_moments(probability, gradients)
    return moments


def _markov_gradient(
    logits: Tensor, ref_logits: Tensor, length: int, *, fixed_states: bool
) -> Tensor:
    leaf = logits.clone().requires_grad_(True)
    divergence = markov_kl(leaf, ref_logits, length, fixed_states=fixed_states)
    (gradient,) = torch.autograd.grad(divergence, leaf)
    return gradient


def _band(values: list[float]) -> dict[str, float]:
    return {name: quantile(values, q) for name, q in (("p10", 0.1), ("median", 0.5), ("p90", 0.9))}
