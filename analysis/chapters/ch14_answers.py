r"""What a path of a trainer minimises over whole answers, its divisor and its group included.

Every batch of a few answers of a small tree is listed, so that an expectation over *batches* is a
finite sum: a mean over the tokens of a batch, a group's baseline and padding are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.func import grad, vmap

from analysis.chapters.ch14_one_state import known_at_states
from analysis.chapters.frameworks.registry import Path
from analysis.chapters.policies import RAGGED, SAME, moved_logits, normal_draws
from kl_term.kl.sequences import (
    Sequences,
    sequence_kl_gradient,
    sequence_probability,
    state_visits,
    token_logp,
)
from kl_term.objectives.aggregation import MODES


def padded_mean(counted: Tensor) -> Tensor:
    """A mean over the batch's tensor, padded to its longest answer: masked tokens are zeros in it,
    and in its divisor."""
    longest = counted.sum(-1).max()
    return counted / (counted.shape[-2] * longest)


#: How a trainer divides: name -> weights [G, T] of a batch's mask, as zeros and ones.
DIVISORS: dict[str, Callable[[Tensor], Tensor]] = {**MODES, "padded_mean": padded_mean}
#: As a table calls them.
DIVIDED_BY = {
    "token_mean": "tokens of the batch",
    "seq_mean_token_mean": "tokens of the answer",
    "seq_mean_token_sum": "answers",
    "seq_mean_token_sum_norm": "a constant",
    "padded_mean": "tokens and padding",
}


def in_a_large_batch(divisor: str, at: Tree) -> Callable[[Tensor], Tensor]:
    """The weights that a divisor tends to as the batch grows: a mean over its tokens divides by
    the mean length, one over padding by the longest; those within an answer stay what they are."""
    width = at.sequences.mask.shape[-1]
    if divisor == "token_mean":
        lengths = at.sequences.mask.sum(-1).to(at.logits.dtype)
        width = sequence_probability(at.old_logits, at.sequences) @ lengths
    elif divisor != "padded_mean":
        return DIVISORS[divisor]
    return lambda counted: counted / (counted.shape[-2] * width)


class Tree(NamedTuple):
    """A policy, its reference and its sampler on every sequence of a tree."""

    sequences: Sequences
    logits: Tensor  #: [states, vocab], and so the others
    ref_logits: Tensor
    old_logits: Tensor

    def fresh(self) -> Tree:
        return self._replace(old_logits=self.logits)


def tree(*, drift: float, staleness: float, seed: int, sequences: Sequences = RAGGED) -> Tree:
    """A reference with Gaussian logits, a policy ``drift`` away, its sampler ``staleness`` behind:
    near enough that no clamp binds."""
    ref_logits = normal_draws((sequences.num_states, 3), seed=seed)
    logits = moved_logits(ref_logits, drift, seed=seed + 1)
    return Tree(sequences, logits, ref_logits, moved_logits(logits, staleness, seed=seed + 2))


class Batches(NamedTuple):
    """Every batch of a few answers: log-probs and mask [batches, G, T]."""

    chance: Tensor  #: [batches], of being drawn
    index: Tensor  #: [batches, G], the answers
    ref_logp: Tensor
    old_logp: Tensor
    mask: Tensor

    @classmethod
    def of(cls, at: Tree, size: int) -> Batches:
        answers = torch.arange(len(at.sequences.mask))
        index = torch.cartesian_prod(*[answers] * size).reshape(-1, size)
        chance = sequence_probability(at.old_logits, at.sequences)[index].prod(-1)
        ref_logp, old_logp = (
            token_logp(x, at.sequences)[index] for x in (at.ref_logits, at.old_logits)
        )
        return cls(chance, index, ref_logp, old_logp, at.sequences.mask[index])


def batch_gradient(
    path: Path, setting: str, at: Tree, *, size: int = 2, large: bool = False
) -> Tensor:
    """Gradient [states, vocab] that descent on the path's KL follows, per unit of beta, its mean
    over every batch of ``size`` answers that the sampler may draw; ``large`` if these are a group
    among many, whose tokens are all in the divisor."""
    batches = Batches.of(at, size)
    divide = in_a_large_batch(path.divisor, at) if large else DIVISORS[path.divisor]
    weights = vmap(divide)(batches.mask.to(at.logits.dtype))
    formula = path.bound(setting)
    owed = None
    if path.placement == "reward":
        owed = formula(batches.old_logp, batches.ref_logp, batches.mask)

    def mean(logits: Tensor) -> Tensor:
        logp = token_logp(logits, at.sequences)[batches.index]
        if owed is None:
            terms = formula(logp, batches.ref_logp, batches.old_logp)
        else:
            terms = owed * (logp - batches.old_logp).exp()
        terms = torch.where(batches.mask, terms, 0.0)
        return batches.chance @ (weights * terms).sum((-2, -1))

    return grad(mean)(at.logits)


def known_over_answers(at: Tree, *, size: int = 2) -> dict[str, Tensor]:
    """Exact gradients [states, vocab] that a path may turn out to have, by what is minimised."""
    visits = state_visits(at.old_logits, at.sequences).unsqueeze(-1)
    per_token = {
        f"{name}, per token": visits * gradient
        for name, gradient in known_at_states(at.logits, at.ref_logits, at.old_logits).items()
    }
    answer = sequence_kl_gradient(at.logits, at.ref_logits, at.sequences)
    return {"reverse KL": answer} | per_token | _of_the_sampler_alone(at, size)


def _of_the_sampler_alone(at: Tree, size: int) -> dict[str, Tensor]:
    """Gradients of means that know no reference: of inverse lengths, and of minus the entropy."""
    batches = Batches.of(at, size)
    lengths = batches.mask.sum(-1).to(at.logits.dtype)

    def mean_of(value: Tensor) -> Callable[[Tensor], Tensor]:
        def mean(logits: Tensor) -> Tensor:
            logp = token_logp(logits, at.sequences)[batches.index].sum(-1)
            return logp.exp().prod(-1) @ value

        return mean

    def minus_entropy(logits: Tensor) -> Tensor:
        logp = token_logp(logits, at.sequences).sum(-1)
        return logp.exp() @ logp

    inverse = {
        "1 / length": (1 / lengths).mean(-1),
        "1 / tokens of the batch": 1 / lengths.sum(-1),
        "1 / longest of the batch": 1 / lengths.max(-1).values,
    }
    found = {name: grad(mean_of(value))(at.logits) for name, value in inverse.items()}
    return {**found, "minus the entropy": grad(minus_entropy)(at.logits)}


class Verdict(NamedTuple):
    """What a gradient is that of, times ``scale``; or the nearest and the share that it leaves."""

    name: str
    scale: float
    unexplained: float

    @property
    def is_exact(self) -> bool:
        return self.unexplained == 0

    def __str__(self) -> str:
        if self.is_exact:
            return self.name
        return f"no divergence ({self.name} leaves {self.unexplained:.0%})"


def judged(gradient: Tensor, known: dict[str, Tensor]) -> Verdict:
    """The known gradient of which this is a positive multiple, else the nearest one."""
    size = gradient.norm()
    if size < SAME * known["reverse KL"].norm():
        return Verdict("nothing", 0.0, 0.0)
    found = []
    for name, exact in known.items():
        if exact.norm() == 0:
            continue
        scale = ((gradient * exact).sum() / exact.square().sum()).clamp(min=0)
        left = ((gradient - scale * exact).norm() / size).item()
        found.append(Verdict(name, scale.item(), 0.0 if left < SAME else left))
    return min(found, key=lambda verdict: verdict.unexplained)


def over_answers(
    path: Path, setting: str, at: Tree, *, size: int = 2, large: bool = True
) -> Verdict:
    """What one setting minimises over whole answers, its divisor and its group included."""
    gradient = batch_gradient(path, setting, at, size=size, large=large)
    return judged(gradient, known_over_answers(at, size=size))


def answers_table(paths: Iterable[Path], at: Tree, *, size: int = 2) -> pd.DataFrame:
    """Every default over whole answers in a large batch, fresh and stale, one row a path."""
    cases = {"fresh": at.fresh(), "stale": at}
    known = {case: known_over_answers(where, size=size) for case, where in cases.items()}
    rows = []
    for path in paths:
        setting = path.default
        if setting is None or setting in path.samples_of_reference:
            continue
        row = {"framework": path.framework, "placement": path.placement, "setting": setting}
        for case, where in cases.items():
            gradient = batch_gradient(path, setting, where, size=size, large=True)
            row[case] = judged(gradient, known[case])
        rows.append(row)
    return pd.DataFrame(rows)
