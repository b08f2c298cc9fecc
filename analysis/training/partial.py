"""Partial rollouts: completions cut at a token budget and continued at the next update.

A group is trained on when all its completions are finished. Until then its prompt and what has been
sampled wait in a buffer; the next update samples on from there with the weights of the day. So one
completion can hold segments of several policies, each with its own log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from analysis.objectives.guidance import current_segment
from analysis.training.arms import Sampler
from analysis.training.rollout import Rollout

#: Update of a token that is not sampled yet.
UNSAMPLED = -1


class Buffer:
    """What the members of one sampler carry from update to update.

    Args:
        sampler: with a budget.
    """

    #: Tensors [m, P, ...] that a run's state holds.
    STATE = ("prompts", "completions", "sampled_at", "old_logp")

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.tensors: dict[str, Tensor] = {}

    def resume(self, prompts: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Prompts to sample on from, this update's where a group begins, and forced tokens.

        Args:
            prompts: [m, P, L], of this update.
            uniforms: [m, P, G, T], of this update; its shape and dtype are used.

        Returns:
            Prompts [m, P, L], and tokens [m, P, G, T], -1 where one is to be drawn.
        """
        if not self.tensors:
            unsampled = torch.full_like(uniforms, UNSAMPLED, dtype=torch.long)
            self.tensors = {
                "prompts": prompts,
                "completions": unsampled,
                "sampled_at": unsampled,
                "old_logp": torch.zeros_like(uniforms),
            }
        sampled = self._sampled()
        begun = sampled.flatten(-2).any(dim=-1, keepdim=True)
        carried = torch.where(begun, self.tensors["prompts"], prompts)
        return carried, torch.where(sampled, self.tensors["completions"], -1)

    def advance(self, rollout: Rollout, update: int) -> tuple[Rollout, Tensor, Tensor]:
        """Take up to the budget of new tokens a completion; let go of the groups that are done.

        Args:
            rollout: sampled from :meth:`resume`, as if there were no budget.
            update: this one.

        Returns:
            The rollout, where nothing of unfinished groups is counted; [m, P] bool, the groups that
            are finished; and [m, P, G, T] bool, the tokens that are to be trained on.
        """
        before = self._sampled()
        position = torch.arange(before.shape[-1], device=before.device)
        first = before.sum(dim=-1, keepdim=True)
        new = (position >= first) & (position < first + self.sampler.budget)
        sampled_at = torch.where(new, update, self.tensors["sampled_at"])
        old_logp = torch.where(before, self.tensors["old_logp"], rollout.old_logp)
        unfinished = rollout.mask & (sampled_at == UNSAMPLED)
        done = ~unfinished.flatten(-2).any(dim=-1)
        mask = rollout.mask & done[..., None, None]
        trained = mask
        if self.sampler.train_on == "current":
            trained = current_segment(mask, sampled_at, update)
        empty = done[..., None, None]
        self.tensors = {
            "prompts": rollout.prompts,
            "completions": rollout.completions,
            "sampled_at": torch.where(empty, UNSAMPLED, sampled_at),
            "old_logp": old_logp,
        }
        rollout = rollout._replace(old_logp=old_logp, sampler_logp=old_logp, mask=mask)
        return rollout, done, trained

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from the tensors of a state; with none, from nothing."""
        self.tensors = dict(tensors)

    def _sampled(self) -> Tensor:
        return self.tensors["sampled_at"] != UNSAMPLED
