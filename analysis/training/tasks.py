"""A task whose reward can be verified: sort the digits of the prompt.

Of 16 tokens, 0..9 are the digits, 10 opens the completion (``SEPARATOR``) and, where the task has
an end token, 11 closes it; the others mean nothing and are always wrong. The completion is right
when it is the sorted prompt, token for token.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from analysis.training.schema import Schema
from analysis.training.setting import Scores

NUM_DIGIT_TOKENS = 10
VOCAB_SIZE = 16
SEPARATOR = 10
END = 11


class SortTask(Schema):
    """Sort ``num_digits`` digits."""

    num_digits: int = Field(default=8, ge=2, le=64)
    #: Must the completion be closed by an end token? Then lengths vary and masks matter.
    end_token: bool = False
    #: ``exact``: 1 for the sorted prompt, else 0. ``graded``: the share of right positions.
    reward: Literal["exact", "graded"] = "exact"

    @property
    def opening(self) -> int:
        return SEPARATOR

    @property
    def prompt_length(self) -> int:
        return self.num_digits

    @property
    def draws_per_prompt(self) -> int:
        return self.num_digits

    @property
    def completion_length(self) -> int:
        """Tokens of a right completion, which is also the longest that is sampled."""
        return self.num_digits + self.end_token

    def prompts(self, uniforms: Tensor) -> Tensor:
        """Digits [..., L] from uniforms in [0, 1) of the same shape."""
        return (uniforms * NUM_DIGIT_TOKENS).long().clamp(max=NUM_DIGIT_TOKENS - 1)

    def targets(self, prompts: Tensor) -> Tensor:
        """The one right completion [..., T] of each prompt [..., L]."""
        ordered = prompts.sort(dim=-1).values
        if not self.end_token:
            return ordered
        return torch.cat([ordered, torch.full_like(ordered[..., :1], END)], dim=-1)

    def completion_mask(self, completions: Tensor) -> Tensor:
        """[..., T], True up to and including the first end token."""
        if not self.end_token:
            return torch.ones_like(completions, dtype=torch.bool)
        ended = (completions == END).long()
        return (ended.cumsum(dim=-1) - ended) == 0

    def score(self, prompts: Tensor, completions: Tensor) -> Scores:
        """Verify completions [..., G, T] of prompts [..., L]; scores are [..., G].

        Tokens after the first end token are not read.
        """
        right = completions == self.targets(prompts).unsqueeze(-2)
        right = right & self.completion_mask(completions)
        accuracy = right.all(dim=-1).float()
        rewards = accuracy if self.reward == "exact" else right.float().mean(dim=-1)
        return Scores(rewards, accuracy)
