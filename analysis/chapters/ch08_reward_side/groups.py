"""Groups of answers: their baseline, their spread, their difficulty, and averages of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from analysis.evidence.claims import band
from analysis.evidence.length_weights import weight_errors
from analysis.evidence.policies import (
    Policies,
    group_moments,
)
from analysis.records import estimator_tail
from analysis.studies.presets.language import smollm2_short
from kl_term.kl.enumeration import cosine
from kl_term.kl.scores import expected_score
from kl_term.kl.sequences import (
    Sequences,
)
from kl_term.objectives.advantages import (
    group_centre,
    group_normalise,
    leave_one_out,
)
from kl_term.objectives.difficulty import arcsine_objective, difficulty_weight, normalised_objective

Advantage = Callable[[Tensor], Tensor]


#: Advantages by the name the chapter calls them.
ADVANTAGES: dict[str, Advantage] = {
    "reward itself": lambda rewards: rewards,
    "minus the mean": group_centre,
    "minus the others' mean": leave_one_out,
    "normalised": group_normalise,
}


def random_bandits(count: int, vocab_size: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """One-step problems: logits and rewards in [0, 1], both [count, vocab]."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(count, vocab_size, generator=generator, dtype=torch.float64)
    return logits, torch.rand(count, vocab_size, generator=generator, dtype=torch.float64)


def baseline_table(logits: Tensor, rewards: Tensor, group_sizes: Iterable[int]) -> pd.DataFrame:
    """Each advantage's expected gradient against the true one, over several problems.

    ``factor`` is the length along the true gradient (median), ``factor_spread`` its range over the
    problems, ``rest`` the largest entry of what it leaves, ``angle`` the largest angle to the true
    gradient (degrees), ``noise`` the median number of groups for a signal-to-noise ratio of one
    over the reward's own.
    """
    exact = expected_score(logits, logits.softmax(-1) * rewards)
    rows = []
    for size in group_sizes:
        noises = []
        for name, advantage in ADVANTAGES.items():
            moments = [
                group_moments(*problem, size, advantage)
                for problem in zip(logits, rewards, strict=True)
            ]
            mean, trace_var = (torch.stack(x) for x in zip(*moments, strict=True))
            noises.append(trace_var / mean.square().sum(-1))
            factor = (mean * exact).sum(-1) / exact.square().sum(-1)
            row = {
                "factor": factor.median(),
                "factor_spread": factor.max() - factor.min(),
                "rest": (mean - factor.unsqueeze(-1) * exact).abs().max(),
                "angle": cosine(mean, exact).clamp(-1, 1).acos().rad2deg().max(),
                "noise": (noises[-1] / noises[0]).median(),
            }
            row = {column: value.item() for column, value in row.items()}
            rows.append({"advantage": name, "group_size": size} | row)
    return pd.DataFrame(rows)


def difficulty_curves(success: Tensor, group_sizes: Iterable[int], *, eps: float) -> pd.DataFrame:
    """Weight of a prompt and objective ascended, by group size; ``inf`` marks the limit."""
    laws = (difficulty_weight, normalised_objective)
    curves = {size: [of(success, size, ddof=0, eps=eps) for of in laws] for size in group_sizes}
    curves[math.inf] = [1 / (success * (1 - success)).sqrt(), arcsine_objective(success)]
    return pd.concat(
        [
            pd.DataFrame({"group_size": n, "success": success, "weight": w, "objective": o})
            for n, (w, o) in curves.items()
        ],
        ignore_index=True,
    )


#: Groups of four whose rewards differ by noise, by a little, and by right and wrong.
NOISE_GROUPS = {
    "rounding": [0.99999, 1.00001, 0.99999, 1.00001],
    "a reward model's noise": [0.70, 0.71, 0.69, 0.70],
    "right and wrong": [0.0, 1.0, 0.0, 1.0],
}


def amplification_table() -> pd.DataFrame:
    """Largest advantage of each group under each way of dividing."""
    divisions = {
        "std": partial(group_normalise, eps=0.0),
        "std, ddof 0": partial(group_normalise, eps=0.0, ddof=0),
        "std + 1e-4": group_normalise,
        "clipped at 0.1": partial(group_normalise, eps=0.0, std_min=0.1),
        "nothing": group_centre,
    }
    groups = torch.tensor(list(NOISE_GROUPS.values()), dtype=torch.float64)
    largest_of = {how: divide(groups).abs().amax(-1) for how, divide in divisions.items()}
    return pd.DataFrame({"group": list(NOISE_GROUPS)} | largest_of)


def textbook_normalise(rewards: Tensor, *, eps: float) -> Tensor:
    """The formula as printed, in the dtype it is given: what an implementation must not do."""
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + eps)


def batch_curves(tables: Policies, sequences: Sequences, sizes: Iterable[int]) -> pd.DataFrame:
    """Quantiles of :func:`~analysis.evidence.length_weights.weight_errors`, by the number of
    completions that are averaged together."""
    rows = []
    for size in sizes:
        for estimator, errors in weight_errors(tables, sequences, completions=size).items():
            quantiles = band(torch.tensor(errors))
            rows.append({"completions": size, "estimator": estimator, **quantiles})
    return pd.DataFrame(rows)


def recorded_spread() -> pd.DataFrame:
    """How much :math:`1/|o|` varies within a prompt on the recorded language model.

    ``variation`` is its deviation within prompts over its mean; ``equal_kl`` the KL of a completion
    (nats) at which the push of k1 is as large as the pull of k2; ``kl`` the recorded one.
    """
    group_size, rows = smollm2_short().config.group_size, []
    for variant, after in estimator_tail.recorded().items():
        log_ratio = after.dump["logp"] - after.dump["ref_logp"]
        by_row = log_ratio.groupby(after.dump["sequence"])
        weight = 1 / by_row.size()
        within = weight.groupby(weight.index // group_size).var().mean()
        variation = math.sqrt(within) / weight.mean()
        rows.append((variant, variation, variation**2 / 2, by_row.sum().mean()))
    return pd.DataFrame(rows, columns=["variant", "variation", "equal_kl", "kl"])
