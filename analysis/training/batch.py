"""A rollout with everything that stays fixed while it is trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from analysis.training.rollout import Rollout


class Batch(NamedTuple):
    """All tensors have the axes [M, P, ...]: members, prompts."""

    rollout: Rollout
    ref_logits: Tensor  #: [M, P, G, T, V], of the reference, at the sampling temperature
    ref_logp: Tensor  #: [M, P, G, T]
    rewards: Tensor  #: [M, P, G], shaped
    outcomes: Tensor  #: [M, P, G], advantage of the whole completion, before any KL
    advantages: Tensor  #: [M, P, G, T], with the KL in the reward folded in
    kept: Tensor  #: [M, P] bool, the groups that the step is a mean over
    trained: Tensor  #: [M, P, G, T] bool, counted tokens that are trained on
    finished: Tensor  #: [M, P, G] bool, False where cut at the longest length
    #: [M, P, G, T, V] and [M, P, G, T], of the teacher; None without one.
    teacher_logits: Tensor | None = None
    teacher_logp: Tensor | None = None
    #: [M, P, G, 1], coefficient of the distillation on each completion; None without a teacher.
    taught: Tensor | None = None

    def of(self, rows: slice | Tensor) -> Batch:
        """The same for some of the members; ``rows`` index the first axis."""
        return self._indexed(lambda part: part[rows])

    def of_prompts(self, prompts: slice) -> Batch:
        """The same for some of the prompts."""
        return self._indexed(lambda part: part[:, prompts].contiguous())

    def _indexed(self, index: Callable[[Tensor], Tensor]) -> Batch:
        rollout = Rollout(*(index(part) for part in self.rollout))
        rest = (None if part is None else index(part) for part in self[1:])
        return Batch(rollout, *rest)
