"""A ratio of the whole sequence on the KL of one token, enumerated over every sequence."""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from analysis.experiments.chapters.gradients import random_tables
from analysis.experiments.frameworks.losses import trl_grpo
from analysis.kl.enumeration import relative_error
from analysis.kl.sequences import (
    Sequences,
    enumerate_sequences,
    sequence_probability,
    token_logp,
    visited_kl_gradient,
)


def corrected_gradient(
    logits: Tensor, ref_logits: Tensor, old_logits: Tensor, sequences: Sequences, *, level: str
) -> Tensor:
    """[states, V]: mean gradient of TRL's corrected KL, summed over tokens, under the sampler."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        logp, ref_logp, old_logp = (
            token_logp(x, sequences) for x in (leaf, ref_logits, old_logits)
        )
        terms = trl_grpo(logp, ref_logp, old_logp, bias_correction=True, level=level).sum(-1)
        mean = sequence_probability(old_logits, sequences) @ terms
        (gradient,) = torch.autograd.grad(mean, leaf)
    return gradient


def level_errors(
    *, vocab_size: int, length: int, trees: int, spread: float, staleness: float, seed: int
) -> pd.DataFrame:
    """Median relative error of each level, on fresh and stale samples.

    Against the gradient of the per-token reverse KL at the states the sampler visits, which the
    token-level ratio has exactly.
    """
    sequences = enumerate_sequences(vocab_size, length)
    tables = random_tables(sequences, vocab_size, trees, spread=spread, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    noise = torch.randn(tables.logits.shape, generator=generator, dtype=tables.logits.dtype)
    rows = []
    for samples, distance in (("fresh", 0.0), ("stale", staleness)):
        for level in ("token", "sequence"):
            errors = []
            for logits, ref_logits, step in zip(*tables, noise, strict=True):
                old_logits = logits - distance * step
                exact = visited_kl_gradient(logits, ref_logits, sequences, old_logits)
                gradient = corrected_gradient(
                    logits, ref_logits, old_logits, sequences, level=level
                )
                errors.append(relative_error(gradient.flatten(), exact.flatten()))
            rows.append(
                {
                    "samples": samples,
                    "level": level,
                    "error": torch.stack(errors).median().item(),
                }
            )
    return pd.DataFrame(rows)
