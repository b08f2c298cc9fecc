"""What a loss minimises in expectation: at states, over answers and batches, fresh and stale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kl_term.audit.readings import Reading
from kl_term.audit.targets import NEITHER, Minimised, minimised, same, visited_gradient
from kl_term.audit.trees import Tree, expected_gradient, state, tree

Samples = Literal["fresh", "stale"]
Level = Literal["state", "sequence"]
#: Sizes of the vocabulary of the states; the last for a call with every token alone.
VOCABULARIES = (2, 3, 5, 12, 50)


@dataclass(frozen=True)
class Expectations:
    """By samples and level."""

    found: dict[Samples, dict[Level, Minimised]]
    #: The KL at the states that the sampler visits that whole answers descend, by samples, if one.
    visited: dict[Samples, str | None]

    def __getitem__(self, samples: Samples) -> dict[Level, Minimised]:
        return self.found[samples]

    @property
    def names(self) -> dict[str, dict[str, str]]:
        return {s: {level: m.known for level, m in of.items()} for s, of in self.found.items()}


def expectations(reading: Reading, *, tick: Callable[[str], None]) -> Expectations:
    """Enumerate tokens, answers and batches of answers."""
    found: dict[Samples, dict[Level, Minimised]] = {}
    visited: dict[Samples, str | None] = {}
    for samples in ("fresh", "stale"):
        tick(f"{samples} samples: every token of a state")
        at_states = _of_states(reading, samples)
        tick(f"{samples} samples: every answer and batch of answers")
        over_answers, visited[samples] = _of_answers(reading, samples)
        found[samples] = {"state": at_states, "sequence": over_answers}
    return Expectations(found, visited)


def _mean(reading: Reading, at: Tree, rows: int) -> Tensor:
    rows = max(rows, reading.fewest)
    return expected_gradient(
        reading.kl, at, rows=rows, separable=reading.separable and rows == 1
    )


def _of_states(reading: Reading, samples: Samples) -> Minimised:
    sizes = VOCABULARIES if reading.fewest == 1 else (2, 3, 5)
    places = [_sampled(state(size, seed=size), samples) for size in sizes]
    return minimised([_mean(reading, at, 1) for at in places], places, reading.tolerance)


def _of_answers(reading: Reading, samples: Samples) -> tuple[Minimised, str | None]:
    """Alone, in pairs and in threes: one name and one coefficient, or neither."""
    alone = _sampled(tree(3, 3, ragged=reading.ragged, seed=1), samples)
    cases = [(alone, 1)] if reading.fewest == 1 else []
    if not reading.separable:
        pairs = _sampled(tree(3, 2, ragged=reading.ragged, seed=2), samples)
        threes = _sampled(tree(2, 3 if reading.ragged else 2, ragged=reading.ragged, seed=3), samples)
        cases += [(pairs, 2), (threes, 3)]
    gradients = [_mean(reading, at, rows) for at, rows in cases]
    places = [at for at, _ in cases]
    whole = minimised(gradients, places, reading.tolerance)
    for direction in ("reverse", "forward"):
        exact = [visited_gradient(at, direction=direction) for at in places]
        if whole.name == NEITHER and same(gradients, exact, reading.tolerance):
            return whole, f"{direction} KL"
    return whole, None


def _sampled(at: Tree, samples: Samples) -> Tree:
    return at.fresh() if samples == "fresh" else at
