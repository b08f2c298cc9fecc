"""What the trainer asks of a policy and of a task; the tiny and the pretrained policy both answer.

Shapes: M runs, P prompts, L prompt tokens, G completions of each, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

#: Named views [M, rows, columns] of the weights [M, N] of all runs.
Weights = Mapping[str, Tensor]


class Scores(NamedTuple):
    """What the verifier says of each completion."""

    rewards: Tensor  #: [...], what training maximises; in [0, 1] where no reward model gives it
    accuracy: Tensor  #: [...], 1.0 where the whole completion is right, else 0.0
    #: [..., T], 1.0 where a token is a right step, else 0.0; None for a task without steps.
    steps: Tensor | None = None
    #: [...] bool, False where the completion was cut at the longest length; None = all finished.
    finished: Tensor | None = None
    #: [...], the task's own reward, where ``rewards`` are a reward model's; None = they are it.
    gold: Tensor | None = None
    #: [..., k], the scores of a reward model's members, where there are several.
    members: Tensor | None = None
    #: [...], their :func:`~analysis.training.ensembles.spread`.
    spread: Tensor | None = None
    #: [...], 1.0 where that is larger than on nineteen in twenty answers of the run's start.
    beyond: Tensor | None = None


class Task(Protocol):
    """Prompts, and completions that can be verified."""

    @property
    def bos_token(self) -> int:
        """The token that opens every completion; it is read, not sampled."""

    @property
    def draws_per_prompt(self) -> int:
        """Uniforms that make one prompt."""

    @property
    def completion_length(self) -> int:
        """Tokens of the longest completion that is sampled."""

    def prompts(self, uniforms: Tensor) -> Tensor:
        """Prompts [M, P, L] from uniforms [M, P, draws_per_prompt]."""

    def final_prompts(self, uniforms: Tensor) -> Tensor:
        """The same for answers of final policies: held-out questions, where the task has them."""

    def completion_mask(self, completions: Tensor) -> Tensor:
        """[..., T], True up to and including the token that ends the completion."""

    def score(self, prompts: Tensor, completions: Tensor, starts: Tensor | None = None) -> Scores:
        """Verify completions [M, P, G, T] of prompts [M, P, L]; scores are [M, P, G].

        ``starts`` [M] says from which start each run began; a task that scores all runs alike does
        not read it.
        """


class PopulationPolicy(Protocol):
    """The forward pass of a population; caches and prefixes are its own business."""

    def unflatten(self, weights: Tensor) -> Weights:
        """Named views of weights [M, N]."""

    def reference(self, start: Tensor, runs: int) -> Weights:
        """The frozen reference of so many runs, from the weights [M, N] or [1, N] of all."""

    def prefill(self, weights: Weights, prompts: Tensor) -> Any:
        """What completions see of prompts [M, P, L]."""

    def empty_cache(self, like: Tensor) -> Any:
        """Room for completions of the shape of ``like`` [M, P, G, T]."""

    def extend(
        self, weights: Weights, prefix: Any, tokens: Tensor, cache: Any = None, start: int = 0
    ) -> Tensor:
        """Logits [M, P, G, T, V] of what follows each of ``tokens`` [M, P, G, T]."""

    def logits(self, weights: Weights, prompts: Tensor, inputs: Tensor) -> Tensor:
        """Logits [M, P, G, T, V] for prompts [M, P, L] and completion inputs [M, P, G, T]."""


@runtime_checkable
class ReplayingPolicy(Protocol):
    """A population policy whose sampling can keep the activations that its gradient needs."""

    def empty_cache(self, like: Tensor, *, keep: bool = False) -> Any:
        """Room for completions; with ``keep`` for their activations too."""

    def replay(self, weights: Weights, cache: Any) -> Tensor:
        """The logits that filled ``cache``, as a function of the ``weights`` that filled it."""


class Teacher(NamedTuple):
    """A frozen policy to learn from, of any size."""

    policy: PopulationPolicy
    weights: Tensor  #: [1, N']

    def of_runs(self, runs: int) -> Weights:
        """The same weights for so many runs, at no cost in memory."""
        return self.policy.reference(self.weights, runs)


class Environment(NamedTuple):
    """What a population trains on, and from where; all on the device of ``start``."""

    task: Task
    policy: PopulationPolicy
    #: [K, N], weights before the first update: a run takes the row of its seed modulo K.
    start: Tensor
    teacher: Teacher | None = None
    #: [K, 2], of several reward models on each start's own answers:
    #: :func:`~analysis.training.ensembles.bounds`.
    start_spreads: Tensor | None = None


def starts_of(seeds: Sequence[int], environment: Environment) -> Tensor:
    """[M]: the row of the starts from which the run of each seed begins."""
    places = [seed % len(environment.start) for seed in seeds]
    return torch.tensor(places, dtype=torch.long, device=environment.start.device)
