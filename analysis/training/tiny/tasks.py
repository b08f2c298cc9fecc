"""Sorting as a population samples it: prompts, right completions, scores of what was sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.records.config import END, FILLER, NUM_DIGIT_TOKENS, SEPARATOR, SortTask
from analysis.training.environment import Scores


class Sorting:
    """The task that a :class:`~analysis.records.config.SortTask` describes."""

    bos_token = SEPARATOR

    def __init__(self, config: SortTask) -> None:
        self.config = config
        self.draws_per_prompt = config.num_digits
        self.completion_length = config.completion_length

    def prompts(self, uniforms: Tensor) -> Tensor:
        """Digits [..., L] from uniforms in [0, 1) of the same shape."""
        return (uniforms * NUM_DIGIT_TOKENS).long().clamp(max=NUM_DIGIT_TOKENS - 1)

    def final_prompts(self, uniforms: Tensor) -> Tensor:
        """As :meth:`prompts`: each is drawn anew, so none is held out."""
        return self.prompts(uniforms)

    def targets(self, prompts: Tensor) -> Tensor:
        """The one right answer [..., A] of each prompt [..., L]."""
        ordered = prompts.sort(dim=-1).values
        if not self.config.end_token:
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
        if not self.config.max_fillers:
            return targets
        low, high = fillers or (0, self.config.max_fillers)
        fillers = low + (uniforms * (high - low + 1)).long().clamp(max=high - low)
        place = torch.arange(self.completion_length, device=prompts.device)
        place = place - fillers.unsqueeze(-1)
        answer = targets.gather(-1, place.clamp(0, self.config.answer_length - 1))
        return torch.where(place < 0, FILLER, answer)

    def completion_mask(self, completions: Tensor) -> Tensor:
        """[..., T], True up to and including the first end token."""
        if not self.config.end_token:
            return torch.ones_like(completions, dtype=torch.bool)
        ended = (completions == END).long()
        return (ended.cumsum(dim=-1) - ended) == 0

    def score(self, prompts: Tensor, completions: Tensor, starts: Tensor | None = None) -> Scores:
        """Verify completions [..., G, T] of prompts [..., L]; scores are [..., G].

        Tokens after the first end token are not read.
        """
        counted = self.completion_mask(completions)
        targets = self.targets(prompts).unsqueeze(-2)
        if not self.config.max_fillers:
            steps = (completions == targets) & counted
        else:
            fillers = (completions == FILLER).long().cumprod(dim=-1).sum(dim=-1, keepdim=True)
            place = torch.arange(completions.shape[-1], device=completions.device) - fillers
            inside = (place >= 0) & (place < self.config.answer_length)
            targets = targets.expand(*completions.shape[:-1], self.config.answer_length)
            wanted = targets.gather(-1, place.clamp(0, self.config.answer_length - 1))
            steps = (completions == wanted) & inside & counted
        right = steps.sum(dim=-1)
        accuracy = (right == self.config.answer_length).float()
        rewards = (
            accuracy if self.config.reward == "exact" else right.float() / self.config.answer_length
        )
        ended = (completions == END).any(dim=-1) if self.config.end_token else None
        return Scores(rewards, accuracy, steps.float(), ended)
