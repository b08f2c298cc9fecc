r"""How much noise the sum over the vocabulary removes from a KL gradient, enumerated.

Gradients are by the unembedding ``[V, d]``, which all states share: a state with hidden vector h
contributes :math:`g \otimes h`, g its gradient by the logits. The variance of a term at a random
state and token splits into two parts: of the token at its state, which the sum over the vocabulary
removes, and of the state, which it cannot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from analysis.kl.divergences import entropy, reverse_kl
from analysis.kl.enumeration import exact_kl_gradient, gradient_moments

#: Sampled losses and the KL whose gradient is their mean on fresh samples. k3 times the live ratio
#: has, on fresh samples, every coefficient of k2.
ARMS = {"k2": "reverse", "k3": "forward"}


class Batch(NamedTuple):
    """States of a language-like policy and its reference."""

    hidden: Tensor  #: [N, d]
    logits: Tensor  #: [N, V]
    ref_logits: Tensor  #: [N, V]


def language_like(
    states: int,
    vocab_size: int,
    *,
    width: int,
    exponent: float,
    sharpness: float,
    drift: float,
    seed: int,
) -> Batch:
    """States whose next tokens follow a power law, each with an order of its own.

    Logits of the reference are ``-exponent * log(rank)`` of the token in a common order, plus a
    product of hidden state and unembedding with standard deviation ``sharpness``, which makes
    states differ. The policy's unembedding has moved so that its logits moved by ``drift``.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden = normal(states, width)
    scale = 1 / width**0.5
    frequency = -exponent * torch.arange(1, vocab_size + 1, dtype=torch.float64).log()
    ref_logits = frequency + sharpness * scale * hidden @ normal(width, vocab_size)
    logits = ref_logits + drift * scale * hidden @ normal(width, vocab_size)
    return Batch(hidden, logits, ref_logits)


def variance_parts(batch: Batch, *, arm: str) -> dict[str, float]:
    """Squared mean of a term's gradient, and its variance within and between states.

    Each is a trace, over states of equal weight and tokens of the policy.
    """
    exact = exact_kl_gradient(batch.logits, batch.ref_logits, direction=ARMS[arm])
    spread = gradient_moments(batch.logits, batch.ref_logits, estimator=arm).trace_var
    squared_width = batch.hidden.square().sum(-1)
    mean = exact.T @ batch.hidden / len(batch.hidden)
    signal = mean.square().sum().item()
    second = (exact.square().sum(-1) * squared_width).mean().item()
    return {
        "signal": signal,
        "within": (spread * squared_width).mean().item(),
        "between": second - signal,
    }


def noise_table(
    vocab_sizes: Iterable[int], *, states: int, arms: Iterable[str] = tuple(ARMS), **shape: float
) -> pd.DataFrame:
    """Per vocabulary and arm: the parts of the variance and what they mean for the batch.

    ``removed`` is the share of the variance that the full vocabulary removes; ``tokens`` is how
    many sampled tokens are worth one with the full vocabulary.
    """
    rows = []
    for vocab_size in vocab_sizes:
        batch = language_like(states, vocab_size, **shape)
        kl = reverse_kl(batch.logits, batch.ref_logits).mean().item()
        spread = entropy(batch.ref_logits).mean().item()
        for arm in arms:
            parts = variance_parts(batch, arm=arm)
            total = parts["within"] + parts["between"]
            rows.append(
                {
                    "vocab": vocab_size,
                    "arm": arm,
                    "kl": kl,
                    "entropy": spread,
                    **parts,
                    "removed": parts["within"] / total,
                    "tokens": total / parts["between"],
                }
            )
    return pd.DataFrame(rows)
