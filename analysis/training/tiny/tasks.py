"""A task whose reward can be verified: sort the digits of the prompt.

Of 16 tokens, 0..9 are the digits, 10 opens the completion (``SEPARATOR``), 11 closes it where the
task has an end token (``END``), and 12 is a ``FILLER`` that may stand before the answer where the
task leaves room for it; the others mean nothing and are always wrong. The completion is right when
what follows its fillers is the sorted prompt, token for token.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from analysis.training.environment import Scores
from kl_term.schema import Schema

NUM_DIGIT_TOKENS = 10
VOCAB_SIZE = 16
SEPARATOR = 10
END = 11
FILLER = 12


class SortTask(Schema):
    """Sort ``num_digits`` digits."""

    num_digits: int = Field(default=8, ge=2, le=64)
    #: Must the completion be closed by an end token? Then lengths vary and masks matter.
    end_token: bool = False
    #: Fillers that fit before the answer: length that is neither rewarded nor punished.
    max_fillers: int = Field(default=0, ge=0, le=64)
    #: ``exact``: 1 for the sorted prompt, else 0. ``graded``: the share of right positions.
    reward: Literal["exact", "graded"] = "exact"

    @model_validator(mode="after")
    def _fillers_need_an_end(self) -> SortTask:
        if self.max_fillers and not self.end_token:
            raise ValueError("max_fillers needs end_token=True: lengths vary")
        return self

    @property
    def bos_token(self) -> int:
        return SEPARATOR

    @property
    def prompt_length(self) -> int:
        return self.num_digits

    @property
    def draws_per_prompt(self) -> int:
        return self.num_digits

    @property
    def answer_length(self) -> int:
        """Tokens of a right completion without fillers."""
        return self.num_digits + self.end_token

    @property
    def completion_length(self) -> int:
        """Tokens of the longest right completion, which is also the longest that is sampled."""
        return self.max_fillers + self.answer_length

    def prompts(self, uniforms: Tensor) -> Tensor:
        """Digits [..., L] from uniforms in [0, 1) of the same shape."""
        return (uniforms * NUM_DIGIT_TOKENS).long().clamp(max=NUM_DIGIT_TOKENS - 1)

    def targets(self, prompts: Tensor) -> Tensor:
        """The one right answer [..., A] of each prompt [..., L]."""
        ordered = prompts.sort(dim=-1).values
        if not self.end_token:
            return ordered
        return torch.cat([ordered, torch.full_like(ordered[..., :1], END)], dim=-1)

    def examples(
        self, prompts: Tensor, uniforms: Tensor, fillers: tuple[int, int] | None = None
    ) -> Tensor:
        """Right completions [..., T] of prompts [..., L].

        Uniforms [...] in [0, 1) choose the number of fillers between the fewest and the most of
        ``fillers``, by default 0 and ``max_fillers``. What follows the end is the end token again.
        """
        targets = self.targets(prompts)
        if not self.max_fillers:
            return targets
        low, high = fillers or (0, self.max_fillers)
        fillers = low + (uniforms * (high - low + 1)).long().clamp(max=high - low)
        place = torch.arange(self.completion_length, device=prompts.device)
        place = place - fillers.unsqueeze(-1)
        answer = targets.gather(-1, place.clamp(0, self.answer_length - 1))
        return torch.where(place < 0, FILLER, answer)

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
        counted = self.completion_mask(completions)
        targets = self.targets(prompts).unsqueeze(-2)
        if not self.max_fillers:
            steps = (completions == targets) & counted
        else:
            fillers = (completions == FILLER).long().cumprod(dim=-1).sum(dim=-1, keepdim=True)
            place = torch.arange(completions.shape[-1], device=completions.device) - fillers
            inside = (place >= 0) & (place < self.answer_length)
            targets = targets.expand(*completions.shape[:-1], self.answer_length)
            wanted = targets.gather(-1, place.clamp(0, self.answer_length - 1))
            steps = (completions == wanted) & inside & counted
        right = steps.sum(dim=-1)
        accuracy = (right == self.answer_length).float()
        rewards = accuracy if self.reward == "exact" else right.float() / self.answer_length
        ended = (completions == END).any(dim=-1) if self.end_token else None
        return Scores(rewards, accuracy, steps.float(), ended)
