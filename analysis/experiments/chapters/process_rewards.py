"""Process rewards on reasoning chains small enough to list every path: part of chapter 9."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from analysis.kl.credit import credit_moments, state_average
from analysis.kl.sequences import Sequences, enumerate_sequences, sequence_probability
from analysis.objectives.credit import reward_to_go
from analysis.objectives.process import (
    PATH_SCORES,
    early_stop,
    falls_in_a_row,
    marginal_rewards,
    path_score,
)


class Reasoning(NamedTuple):
    """A chain of right (1) and wrong (0) steps, solved when enough of them are right."""

    sequences: Sequences
    logits: Tensor  #: [states, vocab]
    outcome: Tensor  #: [N], 1 for a path that ends solved


def fixed_length_chain(
    steps: int, needed: int, *, right: float, spread: float = 0.0, seed: int = 0
) -> Reasoning:
    """Paths of ``steps`` steps, each right with probability ``right``, blurred by ``spread``."""
    sequences = enumerate_sequences(2, steps)
    generator = torch.Generator().manual_seed(seed)
    odds = torch.tensor([1 - right, right], dtype=torch.float64).log()
    noise = torch.randn(sequences.num_states, 2, generator=generator, dtype=torch.float64)
    outcome = (sequences.tokens.sum(-1) >= needed).to(torch.float64)
    return Reasoning(sequences, odds + spread * noise, outcome)


def open_length_chain(max_steps: int, *, right: float, stop: float) -> Reasoning:
    """Paths that end on their own (token 2); solved if right steps outnumber the wrong ones."""
    sequences = enumerate_sequences(3, max_steps, eos=2)
    row = torch.tensor([(1 - stop) * (1 - right), (1 - stop) * right, stop], dtype=torch.float64)
    counted = sequences.mask
    lead = ((sequences.tokens == 1) & counted).sum(-1) - ((sequences.tokens == 0) & counted).sum(-1)
    return Reasoning(
        sequences, row.log().expand(sequences.num_states, 3), (lead > 0).to(torch.float64)
    )


def state_values(problem: Reasoning) -> Tensor:
    """[states]: probability of a solved path from each prefix, the score a perfect PRM gives."""
    returns = problem.outcome.unsqueeze(-1).expand(problem.sequences.mask.shape)
    return state_average(returns, problem.logits, problem.sequences)


def prm_scores(problem: Reasoning, table: Tensor, final: Tensor) -> Tensor:
    """[N, T]: score after each step, from a table of prefixes and a score of each finished path."""
    states, mask = problem.sequences.states, problem.sequences.mask
    after = torch.cat([table[states[:, 1:]], final.unsqueeze(-1)], dim=-1)
    is_last = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=-1)
    return torch.where(is_last, final.unsqueeze(-1), after)


def credit_arms(problem: Reasoning, *, seed: int) -> dict[str, Tensor]:
    """Credit [N, T] of every token under outcome and process rewards."""
    mask, outcome = problem.sequences.mask, problem.outcome
    values = state_values(problem)
    generator = torch.Generator().manual_seed(seed)
    random = torch.rand(values.shape, generator=generator, dtype=values.dtype)
    whole = outcome.unsqueeze(-1).expand(mask.shape)
    arms = {"outcome": whole, "outcome minus its mean": whole - values[0]}
    for name, table in (("perfect", values), ("random", random)):
        rewards = marginal_rewards(prm_scores(problem, table, outcome), table[0].item())
        rewards = torch.where(mask, rewards, 0.0)
        arms[f"{name} PRM, to go"] = reward_to_go(rewards)
        arms[f"{name} PRM, immediate"] = rewards
    return arms


def credit_table(problem: Reasoning, *, seed: int) -> pd.DataFrame:
    """Bias and variance of the policy gradient under each credit, enumerated.

    ``bias`` is the distance of the expected gradient from that of the success probability,
    relative to it; ``variance`` the trace of one path's covariance over the outcome's.
    """
    arms = credit_arms(problem, seed=seed)
    moments = {
        name: credit_moments(problem.logits, problem.sequences, credit)
        for name, credit in arms.items()
    }
    exact, reference = moments["outcome"].mean, moments["outcome"].trace_var
    return pd.DataFrame(
        {
            "credit": name,
            "bias": ((m.mean - exact).norm() / exact.norm()).item(),
            "variance": (m.trace_var / reference).item(),
        }
        for name, m in moments.items()
    )


def choice_accuracy(scores: Tensor, probability: Tensor, outcome: Tensor, number: int) -> float:
    """Probability that the best-scored of ``number`` independent paths is a solved one, exact.

    The best score is the maximum of independent draws; ties are broken evenly.
    """
    _, level = scores.unique(return_inverse=True)
    levels = int(level.max()) + 1
    mass = torch.zeros(levels, dtype=probability.dtype).index_add(0, level, probability)
    solved = torch.zeros_like(mass).index_add(0, level, probability * outcome)
    below = torch.cat([mass.new_zeros(1), mass.cumsum(0)])
    best = below[1:] ** number - below[:-1] ** number
    return (best * solved / mass).sum().item()


def best_of_n_curves(
    problem: Reasoning, numbers: Iterable[int], *, noise: float, seeds: int
) -> pd.DataFrame:
    """Exact accuracy of choosing by each path score, under noisy PRMs.

    The PRM is the true value of each prefix with Gaussian noise on its logit, one draw a prefix;
    accuracies are means over ``seeds`` PRMs.
    """
    values = state_values(problem).clamp(0.02, 0.98)
    final = problem.outcome.clamp(0.02, 0.98)
    probability = sequence_probability(problem.logits, problem.sequences)
    rows = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        table, ends = (
            (x.logit() + noise * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sigmoid()
            for x in (values, final)
        )
        scores = prm_scores(problem, table, ends)
        for how in PATH_SCORES:
            of_path = path_score(scores, problem.sequences.mask, how)
            rows += [
                {
                    "how": how,
                    "number": number,
                    "accuracy": choice_accuracy(of_path, probability, problem.outcome, number),
                }
                for number in numbers
            ]
    return pd.DataFrame(rows).groupby(["how", "number"], sort=False, as_index=False).mean()


def stopping_table(
    problem: Reasoning, patiences: Iterable[int], *, noise: float, seed: int
) -> pd.DataFrame:
    """What early stopping saves and loses, enumerated, by patience; the last row never stops.

    ``tokens`` is the expected number of steps, ``lost`` the probability that a stopped path would
    have been solved, ``rate`` solved paths per thousand steps when stopped paths are resampled.
    """
    generator = torch.Generator().manual_seed(seed)
    values = state_values(problem)
    table = values + noise * torch.randn(values.shape, generator=generator, dtype=values.dtype)
    scores = prm_scores(problem, table, problem.outcome)
    steps = problem.sequences.mask.shape[-1]
    inner = scores[:, :-1]  # after the last step there is nothing left to stop
    probability = sequence_probability(problem.logits, problem.sequences)
    rows = []
    for patience in [*patiences, steps]:
        stopped = falls_in_a_row(inner, patience=patience, initial=table[0].item()).any(-1)
        taken = early_stop(inner, patience=patience, initial=table[0].item())
        tokens = probability @ torch.where(stopped, taken, steps).to(probability.dtype)
        lost = probability @ (stopped * problem.outcome)
        solved = probability @ (~stopped * problem.outcome)
        share = probability @ stopped.to(probability.dtype)
        rows.append(
            {
                "patience": patience,
                "tokens": tokens.item(),
                "stopped": share.item(),
                "lost": (lost / share).item() if share > 0 else 0.0,
                "solved": solved.item(),
                "rate": 1000 * (solved / tokens).item(),
            }
        )
    return pd.DataFrame(rows)
