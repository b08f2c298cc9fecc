"""What a weight on each completion, such as 1/|o|, makes of a KL loss, enumerated: chapter 9."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd
import torch
from torch import Tensor

from analysis.experiments.chapters.gradients import random_tables
from analysis.experiments.chapters.sequences import quantile
from analysis.experiments.language_models.presets import SHORT
from analysis.experiments.language_models.tail import recorded
from analysis.kl.sequences import (
    Sequences,
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_probability,
    visited_kl_gradient,
)
from analysis.kl.surrogates import gradient_coefficient
from analysis.objectives.aggregation import token_mean_weight

#: The KL whose per-state gradient each loss has when tokens are summed.
DIRECTIONS = {"k2": "reverse", "k3": "forward"}


def completion_weights(logits: Tensor, sequences: Sequences, completions: float) -> Tensor:
    """[N]: the weight on each completion's sum of tokens under a mean over the tokens of a batch.

    Args:
        logits: [states, vocab], of the policy that samples.
        sequences: the last axis of its mask counts tokens.
        completions: in the batch; 1 is GRPO's mean, ``inf`` a constant.
    """
    lengths = sequences.mask.sum(dim=-1)
    mass = sequence_probability(logits, sequences)
    probability = torch.zeros(int(lengths.max()) + 1, dtype=mass.dtype).index_add(0, lengths, mass)
    if math.isinf(completions):
        return (1 / (mass @ lengths.to(mass.dtype))).expand(len(lengths))
    return token_mean_weight(probability, int(completions))[lengths]


def unexplained(gradient: Tensor, exact: Tensor) -> float:
    """Share of a gradient [..., V] that no multiple of the exact one explains, each row its own."""
    scale = (gradient * exact).sum(dim=-1, keepdim=True) / exact.square().sum(dim=-1, keepdim=True)
    return ((gradient - scale * exact).norm() / gradient.norm()).item()


def weight_table(
    trees: Iterable[tuple[int, int]], count: int, *, spread: float, seed: int
) -> pd.DataFrame:
    """By how much GRPO's mean turns the gradient of each KL loss away, on random ragged trees.

    Args:
        trees: vocabulary, with the end token, and longest completion of each.
        count: pairs of policy and reference of each.

    Returns:
        One row per tree, medians over the pairs and 90th percentiles (``_90``): ``k2`` and ``k3``,
        share of the gradient that the KL with token sums does not explain; ``k2_states`` and
        ``k3_states``, that no reweighting of states explains; ``k1``, norm over that of k2.
    """
    rows = []
    for vocab_size, longest in trees:
        sequences = enumerate_sequences(vocab_size, longest, eos=vocab_size - 1)
        tables = random_tables(sequences, vocab_size, count, spread=spread, seed=seed)
        measured = [_compare(*pair, sequences, 1) for pair in zip(*tables, strict=True)]
        row = {"vocab_size": vocab_size, "longest": longest}
        for name in measured[0]:
            values = [m[name] for m in measured]
            row |= {name: quantile(values), f"{name}_90": quantile(values, 0.9)}
        rows.append(row)
    return pd.DataFrame(rows)


def batch_curves(
    tree: tuple[int, int], count: int, sizes: Iterable[int], *, spread: float, seed: int
) -> pd.DataFrame:
    """The same by the number of completions whose tokens are averaged together.

    Returns:
        One row per size and estimator: ``completions``, ``estimator``, ``low``, ``median`` and
        ``high`` (10th, 50th and 90th percentile over the pairs).
    """
    vocab_size, longest = tree
    sequences = enumerate_sequences(vocab_size, longest, eos=vocab_size - 1)
    tables = random_tables(sequences, vocab_size, count, spread=spread, seed=seed)
    rows = []
    for size in sizes:
        measured = [_compare(*pair, sequences, size) for pair in zip(*tables, strict=True)]
        for estimator in DIRECTIONS:
            values = [m[estimator] for m in measured]
            low, median, high = (quantile(values, q) for q in (0.1, 0.5, 0.9))
            rows.append(
                {
                    "completions": size,
                    "estimator": estimator,
                    "low": low,
                    "median": median,
                    "high": high,
                }
            )
    return pd.DataFrame(rows)


def _compare(
    logits: Tensor, ref_logits: Tensor, sequences: Sequences, completions: float
) -> dict[str, float]:
    weights = completion_weights(logits, sequences, completions)
    norms, compared = {}, {}
    for estimator in ("k1", "k2", "k3"):
        gradient = expected_sequence_gradient(
            logits,
            ref_logits,
            sequences,
            estimator=estimator,
            token_weights=weights.unsqueeze(-1),
        )
        norms[estimator] = gradient.norm().item()
        if estimator in DIRECTIONS:
            exact = visited_kl_gradient(
                logits, ref_logits, sequences, direction=DIRECTIONS[estimator]
            )
            compared[estimator] = unexplained(gradient.flatten(), exact.flatten())
            compared[f"{estimator}_states"] = unexplained(gradient, exact)
    return {"k1": norms["k1"] / norms["k2"], **compared}


def position_gradients(
    logits: Tensor, ref_logits: Tensor, *, estimator: str
) -> tuple[Tensor, Tensor]:
    """A KL loss under 1/|o| where only the end token, the last one, decides the length.

    In closed form, for policies that see the position alone: no sequence is listed.

    Args:
        logits, ref_logits: [T, vocab]; at the last position every token ends the completion.

    Returns:
        The expected gradient, and that of the KL with tokens summed, both [T, vocab].
    """
    logp = logits.log_softmax(dim=-1)
    ends = logp[:, -1].exp()
    reached = torch.cat([torch.ones(1, dtype=ends.dtype), (1 - ends[:-1]).cumprod(dim=0)])
    now = 1 / torch.arange(1, len(ends) + 1, dtype=ends.dtype)
    mass = torch.cat([(reached * ends)[:-1], reached[-1:]])  # of each length
    later = (mass * now).flip(0).cumsum(0).flip(0) / mass.flip(0).cumsum(0).flip(0)
    weights = torch.cat([later[1:], now[-1:]]).unsqueeze(-1).repeat(1, logits.shape[-1])
    weights[:, -1] = now
    coefficient = gradient_coefficient(logp, ref_logits.log_softmax(dim=-1), estimator=estimator)
    visited = reached.unsqueeze(-1) * logp.exp() * coefficient
    parts = (visited * weights, visited)
    return tuple(part - logp.exp() * part.sum(dim=-1, keepdim=True) for part in parts)


def long_answers(
    means: Iterable[int], count: int, *, vocab_size: int, spread: float, seed: int
) -> pd.DataFrame:
    """What 1/|o| does to a k2 loss by the length of answers, where the end token decides it.

    Lengths are log-normal with a standard deviation of the logarithm of 1/2, cut at four times the
    median; logits of the other tokens, and shifts of the reference's, are Gaussian.

    Returns:
        One row per median length: medians of ``k2`` and ``k2_states`` as in :func:`weight_table`.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for mean in means:
        length = torch.arange(1, 4 * mean + 1, dtype=torch.float64)
        mass = (-2 * (length / mean).log().square()).exp() / length
        hazard = mass / mass.flip(0).cumsum(0).flip(0)
        measured = []
        for _ in range(count):
            shape = (2, len(length), vocab_size)
            policy, moves = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
            others = policy[:-1, :-1].logsumexp(dim=-1)
            policy[:-1, -1] = hazard[:-1].logit() + others
            pair = position_gradients(policy, policy + moves, estimator="k2")
            measured.append((unexplained(*(g.flatten() for g in pair)), unexplained(*pair)))
        whole, by_state = zip(*measured, strict=True)
        rows.append({"median": mean, "k2": quantile(whole), "k2_states": quantile(by_state)})
    return pd.DataFrame(rows)


def recorded_spread() -> pd.DataFrame:
    r"""How much :math:`1/|o|` varies within a prompt on the recorded language model.

    Returns:
        One row per recorded arm: ``variation`` :math:`= \mathrm{sd}(1/|o|) / \mathrm{mean}(1/|o|)`
        with the variance within prompts, ``equal_kl``, the KL of a completion (nats) at which the
        push of k1 is as large as the pull of k2 to leading order, and ``kl``, the recorded one.
    """
    rows = []
    for arm, after in recorded().items():
        by_row = after.dump.groupby("sequence")
        kl = (after.dump["logp"] - after.dump["ref_logp"]).groupby(after.dump["sequence"]).sum()
        weight = 1 / by_row.size()
        prompts = weight.groupby(weight.index // SHORT.config.group_size)
        variation = math.sqrt(prompts.var().mean()) / weight.mean()
        rows.append(
            {"arm": arm, "variation": variation, "equal_kl": variation**2 / 2, "kl": kl.mean()}
        )
    return pd.DataFrame(rows)
