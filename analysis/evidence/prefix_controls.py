"""What the best control variate of the prefix loss saves, along chains of any length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional

from analysis.evidence.policies import Chains, random_chains
from kl_term.kl.control import (
    control_sums,
    fitted_control,
    fitted_control_of_gradients,
    weight_of,
)
from kl_term.kl.credit import sample_gradients
from kl_term.kl.full_vocabulary import markov_kl
from kl_term.kl.importance import importance_ratio
from kl_term.kl.prefix import markov_kl_moments
from kl_term.kl.returns import reward_to_go
from kl_term.kl.sequences import (
    Sequences,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
)
from kl_term.kl.truncated_prefix import truncated_prefix_coefficients, windowed_ratio


class Parabola(NamedTuple):
    """Variance of one answer's gradient by the weight of the control variate, of each chain."""

    at_zero: Tensor  #: [chains], k1 to go
    curvature: Tensor
    slope: Tensor

    def at(self, control: Tensor | float) -> Tensor:
        """Variance over that of k1 to go, [..., chains]."""
        return 1 + (self.curvature * control + 2 * self.slope) * control / self.at_zero

    @property
    def best(self) -> Tensor:
        return -self.slope / self.curvature


def parabolas(chains: Chains, length: int) -> Parabola:
    """Of answers of a length, with the mean KL to go as baseline."""
    pairs = zip(*chains[:2], strict=True)
    signal = torch.stack([grad(markov_kl)(*pair, length).square().sum() for pair in pairs])
    ends = markov_kl_moments(*chains, length, baseline=True)
    middle = markov_kl_moments(*chains, length, baseline=True, control=0.5)["k3 prefix"][-1]
    zero, one = ends["k1 reward to go"][-1], ends["k3 prefix"][-1]
    curvature = 2 * (zero + one - 2 * middle)
    return Parabola(zero - signal, curvature, (one - zero - curvature) / 2)


def given_up(chains: Chains, factor: float) -> Chains:
    """Chains whose policies draw the first token so many times as seldom as they did."""
    seldom = torch.zeros_like(chains.logits)
    seldom[..., 0] = torch.tensor(factor).log()
    return Chains(chains.logits + seldom, chains.ref_logits, chains.old_logits + seldom)


class Drawn(NamedTuple):
    """Answers of each chain's sampler, [chains, answers, length]."""

    logp: Tensor
    ref_logp: Tensor
    old_logp: Tensor
    rows: Tensor
    tokens: Tensor


def draw_answers(chains: Chains, count: int, length: int, *, seed: int) -> Drawn:
    """``count`` answers of each chain."""
    generator = torch.Generator().manual_seed(seed)
    number, rows, _ = chains.logits.shape
    sampler = chains.old_logits.softmax(-1)
    row = torch.full((number, count), rows - 1)
    visited, taken = [], []
    each = torch.arange(number).unsqueeze(-1)
    for _ in range(length):
        chance = sampler[each, row].flatten(0, 1)
        token = torch.multinomial(chance, 1, generator=generator).view(number, count)
        visited.append(row)
        taken.append(token)
        row = token
    rows_seen, tokens = torch.stack(visited, -1), torch.stack(taken, -1)
    index = (each.unsqueeze(-1), rows_seen, tokens)
    return Drawn(*(x.log_softmax(-1)[index] for x in chains), rows_seen, tokens)


def answer_gradients(drawn: Drawn, logits: Tensor, control: float) -> Tensor:
    """[answers, rows * vocab]: the prefix loss's gradient on each answer of one chain.

    ``drawn`` is of that chain; the mean of the answers at a position is the baseline.
    """
    ratio = importance_ratio(
        drawn.logp, drawn.old_logp, torch.ones_like(drawn.rows), level="prefix"
    )
    log_ratio = drawn.logp - drawn.ref_logp
    cost = ratio * (log_ratio + control * torch.expm1(-log_ratio))
    credit = reward_to_go(cost) - cost + ratio * log_ratio
    credit = credit - ratio * credit.mean(0)
    return table_gradients(credit, drawn, logits)


def fitted(chains: Chains, length: int, answers: int, *, seed: int) -> dict[str, Tensor]:
    """The weight that each way to fit takes from so many answers, [chains]."""
    drawn = draw_answers(chains, answers, length, seed=seed)
    ways: dict[str, list[Tensor]] = {"tokens": [], "gradients": []}
    for index, logits in enumerate(chains.logits):
        one = Drawn(*(part[index] for part in drawn))
        policy = logits.softmax(-1)
        scores = 1 - 2 * one.logp.exp() + policy.square().sum(-1)[one.rows]
        sampled = (
            one.logp,
            one.ref_logp,
            one.old_logp,
            torch.ones_like(one.rows, dtype=torch.bool),
        )
        ways["tokens"].append(fitted_control(*sampled, squared_scores=scores))
        ends = (answer_gradients(one, logits, x) for x in (0.0, 1.0))
        ways["gradients"].append(fitted_control_of_gradients(*ends))
    return {way: torch.stack(found) for way, found in ways.items()}


def control_table(
    lengths: Iterable[int], *, answers: int = 64, batches: int = 10, count: int = 12, seed: int = 0
) -> pd.DataFrame:
    """Variance of the prefix loss over that of k1 to go: medians over chains and batches.

    With k3, with the best weight, and with one fitted on ``answers`` others; ``worst_k3`` and
    ``worst_tokens`` are the largest over chains and batches.
    """
    kinds = {"0.1 apart": 0.1, "1 apart": 1.0, "a token at 1/10": 0.1, "a token at 1/100": 0.01}
    rows = []
    for stale in (0.0, 0.1):
        for kind, number in kinds.items():
            drift = number if "apart" in kind else 0.3
            chains = random_chains(8, count, drift=drift, staleness=stale, seed=seed)
            if "apart" not in kind:
                chains = given_up(chains, number)
            for length in lengths:
                parabola = parabolas(chains, length)
                batch = [fitted(chains, length, answers, seed=seed + i) for i in range(batches)]
                by_way = {
                    way: parabola.at(torch.stack([found[way] for found in batch]))
                    for way in batch[0]
                }
                pairs = zip(*chains[:2], strict=True)
                kl = torch.stack([markov_kl(*pair, length) for pair in pairs])
                rows.append(
                    {
                        "policy": kind,
                        "staleness": stale,
                        "length": length,
                        "kl": kl.median().item(),
                        "k3": parabola.at(1.0).median().item(),
                        "best": parabola.at(parabola.best).median().item(),
                        "control": parabola.best.median().item(),
                        "tokens": by_way["tokens"].median().item(),
                        "gradients": by_way["gradients"].median().item(),
                        "worst_k3": parabola.at(1.0).max().item(),
                        "worst_tokens": by_way["tokens"].max().item(),
                        "worst_gradients": by_way["gradients"].max().item(),
                    }
                )
    return pd.DataFrame(rows)


class SameBatch(NamedTuple):
    """Bias of a weight that is fitted on the batch that it is used on, in norms of the gradient."""

    bias: Tensor
    bound: Tensor  #: half the root of the mean squared difference of both ends, over n


def same_batch_bias(
    logits: Tensor,
    ref_logits: Tensor,
    sequences: Sequences,
    old_logits: Tensor | None = None,
    *,
    answers: int,
) -> SameBatch:
    """By every batch of so many answers, of one row of logits a prefix."""
    sampler = logits if old_logits is None else old_logits
    logp, ref_logp, old_logp = (token_logp(x, sequences) for x in (logits, ref_logits, sampler))
    chance = sequence_probability(sampler, sequences)
    sums = control_sums(logp, ref_logp, old_logp, sequences.mask)
    ratio = importance_ratio(logp, old_logp, sequences.mask, level="prefix")
    variate = torch.where(sequences.mask, ratio * torch.expm1(ref_logp - logp), 0.0)
    step = sample_gradients(logits, sequences, reward_to_go(variate) - variate).flatten(1)
    others, odds = sums.new_zeros(1, 2), chance.new_ones(1)
    for _ in range(answers - 1):
        others = (others.unsqueeze(1) + sums).flatten(0, 1)
        odds = (odds.unsqueeze(1) * chance).flatten()
    # By symmetry the difference of one answer, times the weight of all, has the mean's mean.
    weight = weight_of(sums.unsqueeze(1) + others) @ odds
    size = sequence_kl_gradient(logits, ref_logits, sequences).norm()
    spread = (chance @ step.square().sum(-1) / answers).sqrt()
    return SameBatch(((chance * weight) @ step).norm() / size, spread / 2 / size)


def table_gradients(credit: Tensor, drawn: Drawn, logits: Tensor) -> Tensor:
    """[answers, rows * vocab], from the credit [answers, length] beside each score, one chain."""
    found = torch.zeros(len(credit), logits.numel(), dtype=logits.dtype)
    found.scatter_add_(1, drawn.rows * logits.shape[-1] + drawn.tokens, credit)
    visits = torch.zeros(len(credit), len(logits), dtype=logits.dtype)
    visits.scatter_add_(1, drawn.rows, credit)
    return found - (visits.unsqueeze(-1) * logits.softmax(-1)).flatten(1)


def truncation_table(
    staleness: float,
    caps: Iterable[float],
    windows: Iterable[int],
    *,
    length: int = 128,
    drift: float = 0.3,
    stickiness: float = 0.0,
    answers: int = 256,
    batches: int = 10,
    count: int = 3,
    seed: int = 0,
) -> pd.DataFrame:
    """Error of the mean gradient of a batch under the truncated prefix ratio, in norms of the
    exact one: root mean square over batches, and of the mean of all batches (which still holds
    some noise); medians over chains. ``moment`` is the second moment of a window's ratio."""
    kinds = {"drift": drift, "staleness": staleness, "stickiness": stickiness}
    chains = random_chains(8, count, **kinds, seed=seed)
    drawn = draw_answers(chains, answers * batches, length, seed=seed)
    exact = [grad(markov_kl)(*pair, length).flatten() for pair in zip(*chains[:2], strict=True)]
    counted = torch.ones(answers * batches, length, dtype=torch.bool)
    rows = []
    for window in windows:
        for cap in caps:
            errors = []
            for index, logits in enumerate(chains.logits):
                one = Drawn(*(part[index] for part in drawn))
                sampled = (one.logp, one.ref_logp, one.old_logp, counted)
                credit = truncated_prefix_coefficients(*sampled, cap=cap, window=window)
                ratio = windowed_ratio(one.logp, one.old_logp, counted, window=window)
                before = functional.pad(ratio.clamp(max=cap)[:, :-1], (1, 0), value=1.0)
                known = before * torch.exp(one.logp - one.old_logp)  # of mean zero with its score
                gradients = table_gradients(credit - known * credit.mean(0), one, logits)
                means = gradients.unflatten(0, (batches, answers)).mean(1)
                size = exact[index].norm()
                spread = (means - exact[index]).square().sum(-1).mean().sqrt() / size
                errors.append((spread, (means.mean(0) - exact[index]).norm() / size))
            error, bias = torch.tensor(errors).median(0).values.tolist()
            row = {"window": window, "cap": cap, "error": error, "bias": bias}
            rows.append(row | {"moment": ratio[:, -1].square().mean().item()})
    return pd.DataFrame(rows)
