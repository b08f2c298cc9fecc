"""A task that is rewarded by reward models, whatever these are: the runs never see its own reward.

Shapes: M runs, P prompts, L prompt tokens, G completions of each, T tokens, k members.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from analysis.training.environment import Scores, Task


class Rating(NamedTuple):
    """What reward models say of completions."""

    rewards: Tensor  #: [M, P, G]
    members: Tensor | None = None  #: [M, P, G, k], of each member, where there are several


class RewardModels(Protocol):
    """One reward model, or one ensemble, for each start."""

    def __len__(self) -> int:
        """How many starts have one."""

    def rate(self, prompts: Tensor, completions: Tensor, starts: Tensor) -> Rating:
        """Completions [M, P, G, T] of prompts [M, P, L] by the models of starts [M]."""


class Proxied:
    """A task whose completions are rewarded by reward models.

    Args:
        task: what they approximate; its reward becomes the ``gold`` of the scores.
        models: a run is rewarded by that of its start.
    """

    def __init__(self, task: Task, models: RewardModels) -> None:
        self.task, self.models = task, models
        self.bos_token = task.bos_token
        self.draws_per_prompt = task.draws_per_prompt
        self.completion_length = task.completion_length

    def prompts(self, uniforms: Tensor) -> Tensor:
        """Those of the task."""
        return self.task.prompts(uniforms)

    def final_prompts(self, uniforms: Tensor) -> Tensor:
        """Those of the task."""
        return self.task.final_prompts(uniforms)

    def completion_mask(self, completions: Tensor) -> Tensor:
        """That of the task."""
        return self.task.completion_mask(completions)

    def score(self, prompts: Tensor, completions: Tensor, starts: Tensor | None = None) -> Scores:
        """Completions [M, P, G, T] of prompts [M, P, L] by the models of their runs' starts [M].

        Accuracy and gold are the verifier's; there are no step rewards.

        Raises:
            ValueError: there are several models, and nothing says which are the runs'.
        """
        if starts is None:
            if len(self.models) > 1:
                raise ValueError(f"give starts: there are {len(self.models)} reward models")
            starts = torch.zeros(len(prompts), dtype=torch.long, device=prompts.device)
        truth = self.task.score(prompts, completions, starts)
        rewards, members = self.models.rate(prompts, completions, starts)
        return truth._replace(rewards=rewards, steps=None, gold=truth.rewards, members=members)
