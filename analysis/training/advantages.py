"""From the verifier's scores to advantages: shaping, baseline and credit of each run's variant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.records.config import Run
from analysis.records.variants import Advantage, Shaping
from analysis.training.environment import Scores
from analysis.training.population import Groups
from kl_term.objectives.advantages import group_centre, group_normalise, leave_one_out
from kl_term.objectives.credit import reward_to_go
from kl_term.objectives.filtering import informative_groups
from kl_term.objectives.groups import deviations, standardise
from kl_term.objectives.lengths import length_penalty, relative_length_reward, soft_overlong
from kl_term.objectives.process import marginal_rewards
from kl_term.objectives.rejection import shortest_right


class Advantages(NamedTuple):
    """Of each token before any KL, and which prompts count. M runs."""

    rewards: Tensor  #: [M, P, G], shaped
    tokens: Tensor  #: [M, P, G, T], advantages; 0 where masked
    kept: Tensor  #: [M, P] bool, False for groups that are left out


class AdvantageTerms:
    """Who shapes and who normalises how."""

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        keys = [(run.variant.shaping, run.variant.advantage) for run in runs]
        self.groups = Groups(keys, device)
        self.noisy = any(shaping.noise for shaping, _ in keys)
        self.needs_steps = any(advantage.level != "outcome" for _, advantage in keys)

    def of_scores(
        self, scores: Scores, mask: Tensor, penalties: Tensor, noise: Tensor | None
    ) -> Advantages:
        """Rewards and advantages of a rollout, and the groups that count.

        Args:
            scores: of the completions.
            mask: [M, P, G, T].
            penalties: [M, P, G], subtracted from the shaped reward.
            noise: [M, P, G] in [0, 1); needed if any variant has noisy rewards.

        Raises:
            ValueError: a variant reads step rewards and the task has none.
        """
        if self.needs_steps and scores.steps is None:
            raise ValueError("level='process' and 'marginal' need a task that scores steps")
        rewards, advantages, kept = [], [], []
        for (shaping, advantage), rows, _ in self.groups:
            of_rows = Scores(*(None if part is None else part[rows] for part in scores))
            counted = mask[rows]
            shaped = shaped_rewards(shaping, of_rows, counted)
            if shaping.noise:
                shaped = shaped + shaping.noise * noise[rows]
            shaped = shaped - penalties[rows]
            rewards.append(shaped)
            advantages.append(token_advantages(advantage, shaped, of_rows, counted))
            kept.append(kept_groups(advantage, shaped))
        join = self.groups.join
        return Advantages(join(rewards), join(advantages), join(kept))


def shaped_rewards(shaping: Shaping, scores: Scores, mask: Tensor) -> Tensor:
    """[M, P, G]: the reward of the task with its length reward, before any noise."""
    rewards, lengths = scores.rewards, mask.sum(dim=-1)
    if shaping.length == "linear":
        return length_penalty(rewards, lengths, weight=shaping.weight)
    if shaping.length == "relative":
        return rewards + shaping.weight * relative_length_reward(scores.accuracy == 1.0, lengths)
    if shaping.length == "soft_overlong":
        overlong = soft_overlong(lengths, max_length=mask.shape[-1], buffer=shaping.buffer)
        return rewards + shaping.weight * overlong
    return rewards


def token_advantages(advantage: Advantage, rewards: Tensor, scores: Scores, mask: Tensor) -> Tensor:
    """[M, P, G, T]: the advantage of each token, 0 where masked."""
    if advantage.level == "outcome":
        if advantage.baseline == "shortest_right":
            chosen = shortest_right(scores.accuracy == 1.0, mask.sum(dim=-1))
            of_completion = chosen.to(rewards.dtype)
        else:
            of_completion = _baselined(advantage, rewards)
        return torch.where(mask, of_completion.unsqueeze(-1), 0.0)
    if advantage.level == "process":
        to_go = reward_to_go(_of_steps(advantage, torch.where(mask, scores.steps, 0.0), mask))
        return torch.where(mask, to_go, 0.0).to(rewards.dtype)
    share = torch.where(mask, scores.steps, 0.0).cumsum(dim=-1) / mask.shape[-1]
    to_go = reward_to_go(marginal_rewards(share))  # (M, P, G, T)
    baselined = _baselined(advantage, to_go.transpose(-1, -2)).transpose(-1, -2)
    return torch.where(mask, baselined, 0.0)


def _of_steps(advantage: Advantage, steps: Tensor, mask: Tensor) -> Tensor:
    """Step rewards [..., G, T] against all counted ones of their group."""
    flat, counted = steps.flatten(-2), mask.flatten(-2)
    if advantage.baseline == "group_centre":
        return deviations(flat, counted).unflatten(-1, mask.shape[-2:])
    options = {"ddof": advantage.ddof, "eps": advantage.eps}
    bounds = {"std_min": advantage.std_min, "std_max": advantage.std_max}
    return standardise(flat, counted, **options, **bounds).unflatten(-1, mask.shape[-2:])


def _baselined(advantage: Advantage, rewards: Tensor) -> Tensor:
    """Rewards [..., G] against the others of their group."""
    match advantage.baseline:
        case "group_normalise":
            return group_normalise(
                rewards,
                ddof=advantage.ddof,
                eps=advantage.eps,
                std_min=advantage.std_min,
                std_max=advantage.std_max,
            )
        case "group_centre":
            return group_centre(rewards)
        case "leave_one_out":
            return leave_one_out(rewards)
        case "zero":
            return torch.zeros_like(rewards)


def kept_groups(advantage: Advantage, rewards: Tensor) -> Tensor:
    """[M, P] bool: the groups that are not left out for their equal rewards."""
    if not advantage.drop_uniform_groups:
        return torch.ones_like(rewards[..., 0], dtype=torch.bool)
    return informative_groups(rewards)
