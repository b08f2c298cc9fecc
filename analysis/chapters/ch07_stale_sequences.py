"""Chapter 7: what weights, credits and masks do to stale sequences, enumerated over all of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad

from analysis import style
from analysis.chapters.claims import band
from analysis.chapters.policies import (
    Policies,
    flat_error,
    log_ratios,
    medians,
    moved_logits,
    random_policies,
)
from analysis.kl.credit import credit_moments
from analysis.kl.importance import importance_ratio
from analysis.kl.returns import reward_to_go
from analysis.kl.sequences import (
    Sequences,
    expected_sequence_gradient,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
    visited_kl_gradient,
)
from analysis.objectives.masking import off_policy_sequence_mask
from analysis.objectives.merged import kl_coefficient_kept, merged_loss

# --- What the chapter computes -----------------------------------------------------------------


def standardised(values: Tensor, probability: Tensor) -> Tensor:
    """Values minus their mean over their standard deviation, under the probabilities given."""
    centred = values - (probability * values).sum(-1, keepdim=True)
    return centred / (probability * centred.square()).sum(-1, keepdim=True).sqrt()


def weighted_kl_gradient(
    pair: Policies, old_logits: Tensor, sequences: Sequences, *, level: str, credit: str
) -> Tensor:
    """[states, vocab]: expected KL gradient from stale sequences, one ratio level and credit."""
    logp, old_logp = (token_logp(x, sequences) for x in (pair.logits, old_logits))
    costs = log_ratios(*pair, sequences)
    owed = reward_to_go(costs) if credit == "to_go" else costs
    ratio = importance_ratio(logp, old_logp, sequences.mask, level=level)
    credits = torch.where(ratio == 0.0, 0.0, ratio * owed)
    return credit_moments(pair.logits, sequences, credits, old_logits).mean


def weight_errors(
    tables: Policies, samplers: Tensor, sequences: Sequences, *, level: str, credit: str
) -> Tensor:
    """[M]: relative error of a weight and credit against each sequence KL's gradient."""
    errors = []
    for *pair, old_logits in zip(*tables, samplers, strict=True):
        found = weighted_kl_gradient(
            Policies(*pair), old_logits, sequences, level=level, credit=credit
        )
        errors.append(flat_error(found, sequence_kl_gradient(*pair, sequences)))
    return torch.tensor(errors)


def sequence_weight_curves(
    tables: Policies, sequences: Sequences, distances: Tensor, *, seed: int
) -> pd.DataFrame:
    """Errors of each weight and credit as samples age, as quantiles over the pairs.

    Staleness is the median KL of sampler from policy over whole sequences (nats).
    """
    rows = []
    for distance in distances.tolist():
        samplers = moved_logits(tables.logits, distance, seed=seed)
        pairs = zip(samplers, tables.logits, strict=True)
        staleness = torch.stack([sequence_kl(*pair, sequences) for pair in pairs]).median().item()
        for level, credit in WEIGHT_LOOKS:
            errors = weight_errors(tables, samplers, sequences, level=level, credit=credit)
            rows.append({"level": level, "credit": credit, "staleness": staleness} | band(errors))
    return pd.DataFrame(rows)


def visited_errors(
    pair: Policies, old_logits: Tensor, sequences: Sequences
) -> dict[tuple[str, str], float]:
    """Distance of each immediate-credit weight to the visited KL gradient that it should equal."""
    return {
        (level, by): flat_error(
            weighted_kl_gradient(pair, old_logits, sequences, level=level, credit="immediate"),
            visited_kl_gradient(*pair, sequences, visits),
        )
        for level in ("token", "prefix")
        for by, visits in (("sampler", old_logits), ("policy", pair.logits))
    }


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
    ref_logp, old_logp = (token_logp(x, sequences) for x in (pair.ref_logits, old_logits))
    fixed = (ref_logp, old_logp, torch.zeros_like(old_logp), sequences.mask)
    options = {"beta": 1.0, "reading": reading, "epsilon_low": 1.0, "epsilon_high": math.inf}

    def expected(logits: Tensor) -> Tensor:
        loss = merged_loss(token_logp(logits, sequences), *fixed, **options)
        return old_logp.sum(-1).exp() @ loss.sum(-1)

    return grad(expected)(pair.logits)


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
    logps = (token_logp(x, sequences) for x in (*pair, old_logits))
    clip = {"beta": beta, "epsilon_low": epsilon, "epsilon_high": epsilon}
    kept = kl_coefficient_kept(*logps, advantages, sequences.mask, **clip)
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

    The rewards [M, N], one a sequence, matter for the clipped row only.
    """
    rows = []
    for *tables_of_pair, old, reward in zip(*tables, samplers, rewards, strict=True):
        pair = Policies(*tables_of_pair)
        advantages = standardised(reward, sequence_probability(old, sequences))
        exact = {
            "error_reverse": visited_kl_gradient(*pair, sequences, old),
            "error_forward": visited_kl_gradient(*pair, sequences, old, direction="forward"),
            "error_sequence": sequence_kl_gradient(*pair, sequences),
        }
        gradients = {
            name: merged_sequence_gradient(pair, old, sequences, **choice)
            if "reading" in choice
            else expected_sequence_gradient(*pair, sequences, old, **choice)
            for name, choice in TREE_TERMS.items()
        }
        gradients["merged, policy inside, clipped"] = clipped_sequence_gradient(
            pair, old, advantages, sequences, beta=beta, epsilon=epsilon
        )
        for term, gradient in gradients.items():
            errors = {name: flat_error(gradient, kl) for name, kl in exact.items()}
            rows.append({"term": term} | errors)
    return medians(rows, "term", interpolation="lower")


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
    found = {"bias": (mean - exact).square().sum() / unit, "variance": variance / unit}
    return {name: x.item() for name, x in found.items()} | {"masked": masked.item()}


def mask_rows(cases: list[MaskCase], sequences: Sequences, delta: float) -> pd.DataFrame:
    """:func:`mask_row` of each case."""
    return pd.DataFrame([mask_row(case, sequences, delta) for case in cases])


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
        {"delta": delta, **mask_rows(cases, sequences, delta).median()} for delta in deltas
    )


# --- What it draws -----------------------------------------------------------------------------

STALENESS = r"staleness $\mathrm{KL}(\pi_{\mathrm{old}} \Vert\, \pi_\theta)$ (nats)"

#: Colour, line style and label of each weight and credit over sequences.
WEIGHT_LOOKS = {
    ("token", "immediate"): ("none", "-", "token, own"),
    ("prefix", "immediate"): ("none", "--", "prefix, own"),
    ("token", "to_go"): ("forward", "-", "token, to go"),
    ("prefix", "to_go"): ("forward", "--", "prefix, to go"),
    ("sequence", "to_go"): ("exact", "-", "sequence, to go"),
}


def draw_sequence_weights(curves: pd.DataFrame) -> Figure:
    """Error against the sequence KL's gradient as samples age, by ratio level and credit."""
    figure, axes = style.subplots(height=4.2)
    for (level, credit), (colour, dashes, label) in WEIGHT_LOOKS.items():
        curve = curves[(curves.level == level) & (curves.credit == credit)]
        look = {"color": style.COLOURS[colour], "linestyle": dashes, "label": label}
        axes.plot(curve.staleness, curve["median"], **look)
    axes.set_ylim(-0.03, None)
    axes.set(xlabel=STALENESS, ylabel="relative error of the\nexpected gradient")
    style.label_line_ends(axes)
    return figure


def draw_masking(table: pd.DataFrame) -> Figure:
    """Mean squared error of the averaged gradient against the number of sequences."""
    figure, axes = style.subplots(height=3.7)
    count = np.logspace(0, 3.5, 60)
    colours = [style.COLOURS[name] for name in ("none", "forward", "minimax01", "reverse")]
    for row, colour in zip(table.itertuples(), colours, strict=False):
        label = "no mask" if np.isinf(row.delta) else rf"$\delta$ = {row.delta:g}"
        axes.loglog(count, row.bias + row.variance / count, color=colour, label=label)
    axes.set_xlabel("sequences averaged (log scale)")
    axes.set_ylabel("squared error over the squared\nexact gradient (log scale)")
    style.label_line_ends(axes)
    return figure
