"""What weights, credits and masks do to stale sequences, enumerated."""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from analysis.evidence.claims import band
from analysis.evidence.policies import (
    Policies,
    by_token,
    flat_error,
    log_ratios,
    measured,
    moved_logits,
    random_policies,
    random_tables,
)
from analysis.evidence.stale_states import standardised
from kl_term.kl.credit import credit_moments
from kl_term.kl.importance import importance_ratio
from kl_term.kl.returns import reward_to_go
from kl_term.kl.sequences import (
    Sequences,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
)
from kl_term.objectives.masking import off_policy_sequence_mask

#: Levels of the ratio with the credits that they are tried with.
WEIGHTS = (
    ("token", "immediate"),
    ("prefix", "immediate"),
    ("token", "to_go"),
    ("prefix", "to_go"),
    ("sequence", "to_go"),
)


def weight_errors(
    tables: Policies, samplers: Tensor, sequences: Sequences, *, level: str, credit: str
) -> Tensor:
    """[M]: relative error of a ratio level and credit, on stale sequences, against each sequence
    KL's gradient."""
    errors = []
    for logits, ref_logits, old_logits in zip(*tables, samplers, strict=True):
        costs = log_ratios(logits, ref_logits, sequences)
        owed = reward_to_go(costs) if credit == "to_go" else costs
        logps = (token_logp(x, sequences) for x in (logits, old_logits))
        ratio = importance_ratio(*logps, sequences.mask, level=level)
        credits = torch.where(ratio == 0.0, 0.0, ratio * owed)
        found = credit_moments(logits, sequences, credits, old_logits).mean
        errors.append(flat_error(found, sequence_kl_gradient(logits, ref_logits, sequences)))
    return torch.tensor(errors)


def sequence_weight_curves(
    tables: Policies, sequences: Sequences, distances: Tensor, *, seed: int
) -> pd.DataFrame:
    """Errors of each weight and credit as samples age, by the median sequence KL of sampler from
    policy (nats)."""
    rows = []
    for distance in distances.tolist():
        samplers = moved_logits(tables.logits, distance, seed=seed)
        pairs = zip(samplers, tables.logits, strict=True)
        staleness = torch.stack([sequence_kl(*pair, sequences) for pair in pairs]).median().item()
        for level, credit in WEIGHTS:
            errors = weight_errors(tables, samplers, sequences, level=level, credit=credit)
            rows.append({"level": level, "credit": credit, "staleness": staleness} | band(errors))
    return pd.DataFrame(rows)


def mask_cases(
    sequences: Sequences, vocab_size: int, count: int, distance: float, *, seed: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Random tables [states, vocab], their samplers, and a standardised advantage [N] of each
    sequence."""
    olds, steps = random_tables(sequences, vocab_size, count, spread=1.0, seed=seed)
    rewards, _ = random_policies(count, len(sequences.tokens), spread=1.0, seed=seed + 1)
    return [
        (old + distance * step, old, standardised(reward, sequence_probability(old, sequences)))
        for old, step, reward in zip(olds, steps, rewards, strict=True)
    ]


def mask_rows(
    cases: list[tuple[Tensor, Tensor, Tensor]], sequences: Sequences, delta: float
) -> pd.DataFrame:
    """Bias and spread of the masked token-ratio policy gradient, a row a case.

    ``bias`` is squared and in units of the on-policy gradient's square, as is the ``variance``
    (trace) of one sequence; ``masked`` is the probability of a masked sequence.
    """

    def row(logits: Tensor, old_logits: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        logp, old_logp = token_logp(logits, sequences), token_logp(old_logits, sequences)
        kept = off_policy_sequence_mask(logp, old_logp, advantages, sequences.mask, delta=delta)
        whole = by_token(advantages, sequences)
        exact = credit_moments(logits, sequences, whole).mean
        ratio = importance_ratio(logp, old_logp, sequences.mask, level="token")
        credit = torch.where(kept, ratio * whole, 0.0)
        mean, variance = credit_moments(logits, sequences, credit, old_logits)
        unit = exact.square().sum()
        gone = sequences.mask.any(-1) & ~kept.any(-1)
        return {
            "bias": (mean - exact).square().sum() / unit,
            "variance": variance / unit,
            "masked": sequence_probability(old_logits, sequences) @ gone.to(unit.dtype),
        }

    return measured(row, *zip(*cases, strict=True))
