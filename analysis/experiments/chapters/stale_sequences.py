"""What weights, credits and masks do to stale sequences, enumerated over all of them: chapter 7."""

from __future__ import annotations

import math
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from analysis.experiments.chapters.gradients import Policies, drifted_logits, random_policies
from analysis.experiments.chapters.off_policy import standardised
from analysis.kl.credit import credit_moments
from analysis.kl.enumeration import relative_error
from analysis.kl.importance import importance_ratio
from analysis.kl.sequences import (
    Sequences,
    expected_sequence_gradient,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
    visited_kl_gradient,
)
from analysis.objectives.credit import reward_to_go
from analysis.objectives.masking import off_policy_sequence_mask
from analysis.objectives.merged import kl_coefficient_kept, merged_loss

#: Weight and credit of the k1 penalty over whole sequences, and what each should equal.
SEQUENCE_WEIGHTS = (
    ("token", "immediate", "visited by the sampler"),
    ("prefix", "immediate", "visited by the policy"),
    ("token", "to_go", "neither"),
    ("prefix", "to_go", "neither"),
    ("sequence", "to_go", "sequence KL"),
)


def weighted_kl_gradient(
    pair: Policies, old_logits: Tensor, sequences: Sequences, *, level: str, credit: str
) -> Tensor:
    """[states * vocab]: expected KL gradient from stale sequences, one ratio level and credit."""
    logp, ref_logp, old_logp = (token_logp(x, sequences) for x in (*pair, old_logits))
    penalty = logp - ref_logp
    owed = reward_to_go(penalty) if credit == "to_go" else penalty
    ratio = importance_ratio(logp, old_logp, sequences.mask, level=level)
    credits = torch.where(ratio == 0.0, 0.0, ratio * owed)
    return credit_moments(pair.logits, sequences, credits, old_logits).mean.flatten()


def moved_tables(logits: Tensor, distance: float, *, seed: int) -> Tensor:
    """[M, states, vocab]: each table moved along its own random direction."""
    flat = logits.flatten(1)
    return drifted_logits(flat, torch.tensor([distance], dtype=flat.dtype), seed=seed).view_as(
        logits
    )


def sequence_weight_curves(
    tables: Policies, sequences: Sequences, distances: Tensor, *, seed: int
) -> pd.DataFrame:
    """Median error of each weight and credit against the sequence KL's gradient, as samples age."""
    rows = []
    for distance in distances.tolist():
        moved = moved_tables(tables.logits, distance, seed=seed)
        for level, credit, _ in SEQUENCE_WEIGHTS:
            errors, staleness = [], []
            for logits, ref_logits, old_logits in zip(*tables, moved, strict=True):
                pair = Policies(logits, ref_logits)
                gradient = weighted_kl_gradient(
                    pair, old_logits, sequences, level=level, credit=credit
                )
                exact = sequence_kl_gradient(logits, ref_logits, sequences).flatten()
                errors.append(relative_error(gradient, exact))
                staleness.append(_sequence_staleness(old_logits, logits, sequences))
            quantiles = torch.stack(errors).quantile(
                torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
            )
            rows.append(
                {"level": level, "credit": credit, "staleness": torch.stack(staleness).median()}
                | dict(zip(("p10", "median", "p90"), quantiles.tolist(), strict=True))
            )
    frame = pd.DataFrame(rows)
    return frame.assign(staleness=frame.staleness.astype(float))


def visited_errors(
    pair: Policies, old_logits: Tensor, sequences: Sequences
) -> dict[tuple[str, str], float]:
    """Distance of each immediate-credit weight to the visited KL gradient that it should equal."""
    return {
        (level, by): relative_error(
            weighted_kl_gradient(pair, old_logits, sequences, level=level, credit="immediate"),
            visited_kl_gradient(*pair, sequences, visits).flatten(),
        ).item()
        for level in ("token", "prefix")
        for by, visits in (("sampler", old_logits), ("policy", pair.logits))
    }


def _sequence_staleness(old_logits: Tensor, logits: Tensor, sequences: Sequences) -> Tensor:
    old_logp, logp = token_logp(old_logits, sequences), token_logp(logits, sequences)
    return (old_logp.sum(-1).exp() * (old_logp - logp).sum(-1)).sum()


#: KL terms compared over stale trees: name, and how the sampled gradient is built.
TREE_TERMS = {
    "merged, sampler inside": {"reading": "old"},
    "merged, policy inside": {"reading": "detached"},
    "merged, policy inside, differentiated": {"reading": "attached"},
    "k2 loss": {"estimator": "k2"},
    "k2 loss, detached ratio": {"estimator": "k2", "weighting": "detached"},
    "k3 loss": {"estimator": "k3"},
    "k3 loss, detached ratio": {"estimator": "k3", "weighting": "detached"},
    "k3 loss, attached ratio": {"estimator": "k3", "weighting": "attached"},
}


def merged_sequence_gradient(
    pair: Policies, old_logits: Tensor, sequences: Sequences, *, reading: str
) -> Tensor:
    """[states, vocab]: expected gradient of the merged KL alone, token by token, without clip."""
    with torch.enable_grad():
        leaf = pair.logits.clone().requires_grad_(True)
        old_logp = token_logp(old_logits, sequences)
        loss = merged_loss(
            token_logp(leaf, sequences),
            token_logp(pair.ref_logits, sequences),
            old_logp,
            torch.zeros_like(old_logp),
            sequences.mask,
            beta=1.0,
            reading=reading,
            epsilon_low=1.0,
            epsilon_high=math.inf,
        )
        expected = (old_logp.sum(-1).exp() * loss.sum(-1)).sum()
        (gradient,) = torch.autograd.grad(expected, leaf)
    return gradient


def clipped_sequence_gradient(
    pair: Policies,
    old_logits: Tensor,
    advantages: Tensor,
    sequences: Sequences,
    *,
    beta: float,
    epsilon: float,
) -> Tensor:
    """[states, vocab]: what the clip leaves of the merged KL, given one advantage a sequence."""
    logp, ref_logp, old_logp = (token_logp(x, sequences) for x in (*pair, old_logits))
    kept = kl_coefficient_kept(
        logp,
        ref_logp,
        old_logp,
        advantages,
        sequences.mask,
        beta=beta,
        epsilon_low=epsilon,
        epsilon_high=epsilon,
    )
    return credit_moments(pair.logits, sequences, kept, old_logits).mean


def tree_table(
    tables: Policies,
    samplers: Tensor,
    rewards: Tensor,
    sequences: Sequences,
    *,
    beta: float,
    epsilon: float,
) -> pd.DataFrame:
    """Each KL term on stale sequences: median relative error of its expected gradient against the
    per-token KLs at the sampler's states, in both directions, and against the sequence KL.

    Args:
        tables: policy and reference tables, [M, states, vocab].
        samplers: [M, states, vocab].
        rewards: [M, N], one a sequence, standardised here; matter for the clipped row only.
        sequences: every sequence.
        beta, epsilon: of the clipped row.
    """
    rows: dict[str, list[list[Tensor]]] = {}
    for logits, ref, old, reward in zip(*tables, samplers, rewards, strict=True):
        advantage = standardised(reward, sequence_probability(old, sequences))
        pair = Policies(logits, ref)
        exact = [
            visited_kl_gradient(*pair, sequences, old),
            visited_kl_gradient(*pair, sequences, old, direction="forward"),
            sequence_kl_gradient(*pair, sequences),
        ]
        gradients = {
            name: merged_sequence_gradient(pair, old, sequences, **choice)
            if "reading" in choice
            else expected_sequence_gradient(*pair, sequences, old, **choice)
            for name, choice in TREE_TERMS.items()
        }
        gradients["merged, policy inside, clipped"] = clipped_sequence_gradient(
            pair, old, advantage, sequences, beta=beta, epsilon=epsilon
        )
        for name, gradient in gradients.items():
            errors = [relative_error(gradient.flatten(), g.flatten()) for g in exact]
            rows.setdefault(name, []).append(errors)
    columns = ("error_reverse", "error_forward", "error_sequence")
    return pd.DataFrame(
        {"term": name, **dict(zip(columns, torch.tensor(e).median(0).values.tolist(), strict=True))}
        for name, e in rows.items()
    )


class MaskCase(NamedTuple):
    """One stale tree of sequences with a standardised advantage for each."""

    logits: Tensor  #: [states, vocab]
    old_logits: Tensor  #: [states, vocab]
    advantages: Tensor  #: [N]


def mask_cases(
    sequences: Sequences, vocab_size: int, count: int, distance: float, *, seed: int
) -> list[MaskCase]:
    """Random tables that have moved from their samplers, with random rewards a sequence."""
    size = sequences.num_states * vocab_size
    old, step = random_policies(count, size, spread=1.0, seed=seed)
    rewards, _ = random_policies(count, len(sequences.tokens), spread=1.0, seed=seed + 1)
    cases = []
    for old_row, step_row, reward in zip(old, step, rewards, strict=True):
        old_logits = old_row.view(sequences.num_states, vocab_size)
        logits = old_logits + distance * step_row.view_as(old_logits)
        advantages = standardised(reward, sequence_probability(old_logits, sequences))
        cases.append(MaskCase(logits, old_logits, advantages))
    return cases


def mask_row(case: MaskCase, sequences: Sequences, delta: float) -> dict[str, float]:
    """Bias and spread of the masked token-ratio policy gradient against the on-policy one.

    ``bias`` is relative to the norm of the exact gradient and squared; ``variance`` is the trace
    of one sequence's covariance in the same unit; ``masked`` the probability of a masked sequence.
    """
    logits, old_logits, advantages = case
    logp, old_logp = token_logp(logits, sequences), token_logp(old_logits, sequences)
    kept = off_policy_sequence_mask(logp, old_logp, advantages, sequences.mask, delta=delta)
    whole = advantages.unsqueeze(-1).expand_as(logp)
    exact = credit_moments(logits, sequences, whole).mean
    ratio = importance_ratio(logp, old_logp, sequences.mask, level="token")
    credit = torch.where(kept, ratio * whole, 0.0)
    mean, variance = credit_moments(logits, sequences, credit, old_logits)
    unit = exact.square().sum()
    gone = sequences.mask.any(-1) & ~kept.any(-1)
    masked = (sequence_probability(old_logits, sequences) * gone).sum()
    bias = (mean - exact).square().sum()
    return {
        "bias": (bias / unit).item(),
        "variance": (variance / unit).item(),
        "masked": masked.item(),
    }


def mask_table(
    sequences: Sequences,
    vocab_size: int,
    deltas: tuple[float, ...],
    *,
    count: int,
    distance: float,
    seed: int,
) -> pd.DataFrame:
    """Medians of :func:`mask_row` over random cases for each threshold; ``inf`` masks nothing."""
    cases = mask_cases(sequences, vocab_size, count, distance, seed=seed)
    return pd.DataFrame(
        {"delta": delta}
        | pd.DataFrame([mask_row(case, sequences, delta) for case in cases]).median().to_dict()
        for delta in deltas
    )
