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

from analysis.chapters.ch14_frameworks.trainers.registry import Path
from analysis.evidence.policies import RAGGED, SAME, moved_logits, normal_draws
from kl_term.audit.states import States, known_gradients
from kl_term.audit.targets import (
    NEITHER,
    NOTHING,
    POTENTIALS,
    decided,
    potential_gradient,
    same,
)
from kl_term.kl.sequences import (
    Sequences,
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

    def answer_logp(self, logits: Tensor) -> Tensor:
        """[N], log-probs of whole answers."""
        return token_logp(logits, self.sequences).sum(-1)

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


class Known(NamedTuple):
    """Exact gradients [states, vocab] of one tree, each in a list of one for the audit."""

    fresh: bool
    answers: dict[str, list[Tensor]]  #: of divergences of whole answers
    tokens: dict[str, list[Tensor]]  #: of those of tokens, at the states that the sampler visits
    lengths: dict[str, list[Tensor]]  #: of means of inverse lengths

    @classmethod
    def at(cls, tree: Tree, *, size: int = 2) -> Known:
        visits = state_visits(tree.old_logits, tree.sequences).unsqueeze(-1)
        by_state = known_gradients(States(tree.logits, tree.ref_logits, tree.old_logits))
        tokens = {name: [visits * gradient] for name, gradient in by_state.items()}
        answers = {name: [potential_gradient(name, tree)] for name in POTENTIALS}
        fresh = torch.equal(tree.logits, tree.old_logits)
        return cls(fresh, answers, tokens, _inverse_lengths(tree, size))


def _inverse_lengths(at: Tree, size: int) -> dict[str, list[Tensor]]:
    """Gradients of means that know no reference, over batches that the policy draws."""
    batches = Batches.of(at, size)
    lengths = batches.mask.sum(-1).to(at.logits.dtype)

    def mean_of(value: Tensor) -> Callable[[Tensor], Tensor]:
        def mean(logits: Tensor) -> Tensor:
            logp = token_logp(logits, at.sequences)[batches.index].sum(-1)
            return logp.exp().prod(-1) @ value

        return mean

    inverse = {
        "1 / length": (1 / lengths).mean(-1),
        "1 / tokens of the batch": 1 / lengths.sum(-1),
        "1 / longest of the batch": 1 / lengths.max(-1).values,
    }
    return {name: [grad(mean_of(value))(at.logits)] for name, value in inverse.items()}


class Verdict(NamedTuple):
    """What a gradient is that of, times ``scale``."""

    name: str  #: as the audit names it; ``, per token`` where it is not of whole answers
    scale: float

    @property
    def of(self) -> str:
        """The divergence, of whole answers and of tokens alike."""
        return self.name.removesuffix(", per token")


def judged(gradient: Tensor, known: Known) -> Verdict:
    """What a gradient [states, vocab] descends: a divergence of answers, of tokens, or a length."""
    for of, addition in ((known.answers, ""), (known.tokens, ", per token")):
        found = decided([gradient], of, SAME, fresh=known.fresh)
        if found.known == NOTHING:
            return Verdict(NOTHING, 0.0)
        if found.known != NEITHER:
            return Verdict(found.known + addition, abs(found.scale))
    for name, exact in known.lengths.items():
        scale = ((gradient * exact[0]).sum() / exact[0].square().sum()).item()
        if scale > 0 and same([gradient], exact, SAME):
            return Verdict(name, scale)
    return Verdict(NEITHER, torch.nan)


def over_answers(
    path: Path, setting: str, at: Tree, *, size: int = 2, large: bool = True
) -> Verdict:
    """What one setting minimises over whole answers, its divisor and its group included."""
    gradient = batch_gradient(path, setting, at, size=size, large=large)
    return judged(gradient, Known.at(at, size=size))


def answers_table(paths: Iterable[Path], at: Tree, *, size: int = 2) -> pd.DataFrame:
    """Every default over whole answers in a large batch, fresh and stale, one row a path."""
    cases = {"fresh": at.fresh(), "stale": at}
    known = {case: Known.at(where, size=size) for case, where in cases.items()}
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
