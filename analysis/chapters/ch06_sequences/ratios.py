"""Importance ratios of whole answers: how far they spread, and what weight each objective gives."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from analysis.evidence.clip_slopes import score_coefficients
from analysis.evidence.policies import (
    Policies,
    by_token,
    flat_error,
    medians,
    random_returns,
)
from kl_term.kl.credit import (
    credit_moments,
)
from kl_term.kl.divergences import chi_square
from kl_term.kl.importance import importance_ratio
from kl_term.kl.products import (
    geometric_spread,
    product_variance,
)
from kl_term.kl.ratio_objectives import (
    ratio_objective_gradient,
)
from kl_term.kl.sequences import (
    Sequences,
    sequence_probability,
    token_logp,
)

CLIPPED = ("gspo", "cispo", "grpo")


#: The weights of the table, in reading order, and what the figure calls them.
WEIGHTS = {
    "none": "no weight",
    "token": "token ratio",
    "prefix": "prefix ratio",
    "sequence": "whole ratio",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "grpo": "GRPO, clipped",
}


def spread_curves(logits: Tensor, old_logits: Tensor, lengths: Sequence[int]) -> pd.DataFrame:
    """Standard deviation of three weights of a sequence of independent tokens, by its length:
    ``product``, ``geometric`` (GSPO) and one ``token``."""
    length = torch.tensor(lengths, dtype=torch.float64)
    chi2 = chi_square(old_logits, logits)  # of the policy from the sampler
    mean, var = geometric_spread(logits, old_logits, length)
    return pd.DataFrame(
        {
            "length": lengths,
            "product": product_variance(chi2, length).sqrt(),
            "geometric": var.sqrt(),
            "geometric_mean": mean,
            "token": chi2.sqrt().expand_as(length),
        }
    )


def gradient_weights(
    logits: Tensor,
    old_logits: Tensor,
    sequences: Sequences,
    returns: Tensor,
    *,
    weight: str,
) -> Tensor:
    """[N, T] credit of each token: its importance weight, cut as its kind does, times the
    return."""
    logp, old_logp = (token_logp(x.detach(), sequences) for x in (logits, old_logits))
    per_token = by_token(returns, sequences)
    if weight == "none":
        return per_token
    if weight not in CLIPPED:
        return importance_ratio(logp, old_logp, sequences.mask, level=weight) * per_token
    options = {"old_logp": old_logp, "advantages": per_token, "mask": sequences.mask}
    return score_coefficients(logp, kind=weight, **options)


def weight_table(tables: Policies, sequences: Sequences, *, seed: int) -> pd.DataFrame:
    """Bias and noise of every weight against the gradient of the policy's own mean return.

    ``tables`` holds policies and their stale samplers; ``noise`` is the standard deviation of one
    sequence's gradient over the norm of the exact one.
    """
    rows = []
    for index, (logits, old) in enumerate(zip(*tables, strict=True)):
        returns = _centred_returns(old, sequences, seed=seed + index)
        exact = ratio_objective_gradient(logits, old, sequences, returns)
        for weight in WEIGHTS:
            credit = gradient_weights(logits, old, sequences, returns, weight=weight)
            mean, trace_var = credit_moments(logits, sequences, credit, old)
            noise = (trace_var.sqrt() / exact.norm()).item()
            rows.append({"weight": weight, "bias": flat_error(mean, exact), "noise": noise})
    return medians(rows, "weight")


def _centred_returns(old_logits: Tensor, sequences: Sequences, *, seed: int) -> Tensor:
    returns = random_returns(sequences, seed=seed)
    return returns - sequence_probability(old_logits, sequences) @ returns


def one_recurrent_state(vocab_size: int, stay: float) -> tuple[Tensor, Tensor]:
    """Policy and sampler [V + 1, V] of Markov tokens that differ after the first token only.

    The sampler is uniform; after the first token the policy repeats it with probability ``stay``.
    """
    sampler = torch.full((vocab_size + 1, vocab_size), 1 / vocab_size, dtype=torch.float64)
    policy = sampler.clone()
    policy[0] = (1 - stay) / (vocab_size - 1)
    policy[0, 0] = stay
    return policy.log(), sampler.log()
