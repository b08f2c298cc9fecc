"""What a loss minimises in expectation: at states, over answers and batches, fresh and stale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kl_term.audit.names import Level, Samples
from kl_term.audit.readings import Reading
from kl_term.audit.targets import NEITHER, Minimised, minimised, same
from kl_term.audit.trees import Tree, expected_gradient, state, tree, visited_gradient

#: Sizes of the vocabulary of the states; the last for a call with every token alone.
VOCABULARIES = (2, 3, 5, 12, 50)


@dataclass(frozen=True)
class Expectations:
    """By samples and level."""

    found: dict[Samples, dict[Level, Minimised]]
    #: The KL at the states that the sampler visits that whole answers descend, by samples, if one.
    visited: dict[Samples, str | None]
    over_vocabulary: bool = False  #: the coefficient falls with the size of the vocabulary

    def __getitem__(self, samples: Samples) -> dict[Level, Minimised]:
        return self.found[samples]

    @property
    def names(self) -> dict[str, dict[str, str]]:
        return {s: {level: m.known for level, m in of.items()} for s, of in self.found.items()}


def expectations(reading: Reading, *, symmetric: bool, tick: Callable[[str], None]) -> Expectations:
    """Enumerate tokens, answers and batches of answers.

    Args:
        reading: of the loss.
        symmetric: the order of the answers in a batch is known not to matter.
        tick: told what is done next.
    """
    found: dict[Samples, dict[Level, Minimised]] = {}
    visited: dict[Samples, str | None] = {}
    over_vocabulary = False
    for samples in ("fresh", "stale"):
        tick(f"{samples} samples: every token of a state")
        at_states, divided = _of_states(reading, samples)
        over_vocabulary |= divided
        tick(f"{samples} samples: every answer and batch of answers")
        over_answers, visited[samples] = _of_answers(reading, samples, symmetric)
        found[samples] = {"state": at_states, "sequence": over_answers}
    return Expectations(found, visited, over_vocabulary)


def _mean(reading: Reading, at: Tree, rows: int, symmetric: bool = False) -> Tensor:
    rows = max(rows, reading.fewest)
    alone = reading.separable and rows == 1
    return expected_gradient(reading.kl, at, rows=rows, symmetric=symmetric, separable=alone)


def _of_states(reading: Reading, samples: Samples) -> tuple[Minimised, bool]:
    """And whether it is divided by the size of the vocabulary; then as if it were summed."""
    sizes: tuple[int, ...] = VOCABULARIES if reading.fewest == 1 else (2, 3, 5)
    if samples == "fresh" and not reading.separable:
        sizes = sizes[:4]  # the largest costs a call a token: once is enough
    places = [_sampled(state(size, seed=size), samples) for size in sizes]
    gradients = [_mean(reading, at, 1) for at in places]
    whole = minimised(gradients, places, reading.tolerance)
    if whole.name != NEITHER or not reading.by_logits:
        return whole, False
    times = [size * gradient for size, gradient in zip(sizes, gradients, strict=True)]
    summed = minimised(times, places, reading.tolerance)
    return (whole, False) if summed.name == NEITHER else (summed, True)


def _of_answers(
    reading: Reading, samples: Samples, symmetric: bool
) -> tuple[Minimised, str | None]:
    """Alone, in pairs and in threes: one name, or neither."""
    alone = _sampled(tree(3, 3, ragged=reading.ragged, seed=1), samples)
    cases = [(alone, 1)] if reading.fewest == 1 else []
    if not reading.separable:
        pairs = _sampled(tree(3, 2, ragged=reading.ragged, seed=2), samples)
        threes = _sampled(
            tree(2, 3 if reading.ragged else 2, ragged=reading.ragged, seed=3), samples
        )
        cases += [(pairs, 2), (threes, 3)]
    gradients = [_mean(reading, at, rows, symmetric) for at, rows in cases]
    places = [at for at, _ in cases]
    whole = minimised(gradients, places, reading.tolerance)
    if whole.name == NEITHER:  # one name may have another coefficient at each size of a batch
        each = [
            minimised([gradient], [at], reading.tolerance)
            for gradient, at in zip(gradients, places, strict=True)
        ]
        if len({m.known for m in each}) == 1:
            whole = each[0]
    for direction in ("reverse", "forward"):
        exact = [visited_gradient(at, direction=direction) for at in places]
        if whole.name == NEITHER and same(gradients, exact, reading.tolerance):
            return whole, f"{direction} KL"
    return whole, None


def _sampled(at: Tree, samples: Samples) -> Tree:
    return at.fresh() if samples == "fresh" else at
