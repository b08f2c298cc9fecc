"""From a rollout to the loss of one optimizer step, per member: policy term plus KL terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.kl.importance import effective_sample_size
from analysis.objectives.guidance import annealed, low_reward_mask
from analysis.training import metrics
from analysis.training.advantage_term import AdvantageTerm
from analysis.training.arms import Distillation
from analysis.training.batch import Batch
from analysis.training.config import Member, RunConfig
from analysis.training.divergence_term import (
    DivergenceTerm,
    Views,
    reference_divergence,
    teacher_divergence,
)
from analysis.training.policy_term import PolicyTerm
from analysis.training.randomness import member_uniforms
from analysis.training.rollout import token_logp
from analysis.training.sampling import Drawn
from analysis.training.setting import PopulationPolicy, Teacher, Weights


class Dated(NamedTuple):
    """What one update differs in from the next, beside its samples. M members."""

    noise: Tensor | None  #: [M, P, G] in [0, 1), of noisy rewards; None if no arm has them
    lessons: Tensor | None  #: [M], weight of each member's distillation; None without a teacher


def lesson_weight(distillation: Distillation | None, update: int) -> float:
    """The weight of a distillation at an update; 0 without one."""
    if distillation is None:
        return 0.0
    start, end = distillation.weight, distillation.weight_end
    if end is None:
        return start
    return annealed(update, distillation.anneal_updates, start=start, end=end)


class Terms:
    """What the members of a population optimise: one object for each part of their arms.

    Raises:
        ValueError: an arm needs a teacher and there is none.
    """

    def __init__(
        self,
        config: RunConfig,
        members: Sequence[Member],
        device: torch.device,
        *,
        has_teacher: bool,
    ) -> None:
        arms = [member.arm for member in members]
        for arm in arms:
            if not has_teacher and (arm.distillation or arm.sampler.by == "teacher"):
                raise ValueError(f"arm {arm.name!r} needs a teacher: set teacher in the config")
        self.has_teacher = has_teacher
        self.seeds = [member.seed for member in members]
        self.arms = arms
        betas = [arm.beta for arm in arms]
        divergences = [reference_divergence(arm) for arm in arms]
        self.kl = DivergenceTerm(divergences, betas, config.dtype, device)
        divergences = [teacher_divergence(arm) for arm in arms]
        self.distillation = DivergenceTerm(divergences, [1.0] * len(arms), config.dtype, device)
        self.advantage = AdvantageTerm(members, device)
        self.policy = PolicyTerm(members, device)

    def at(self, update: int, rewards: Tensor) -> Dated:
        """What depends on the update's number, for rewards [M, P, G]."""
        noise = lessons = None
        if self.advantage.noisy:
            noise = member_uniforms(self.seeds, "noise", update, rewards.shape[1:], rewards.dtype)
            noise = noise.to(rewards.device)
        if self.has_teacher:
            weights = [lesson_weight(arm.distillation, update) for arm in self.arms]
            lessons = torch.tensor(weights, dtype=rewards.dtype).to(rewards.device)
        return Dated(noise, lessons)

    def taught(self, rewards: Tensor, lessons: Tensor) -> Tensor:
        """[M, P, G, 1]: the coefficient of the distillation on each completion."""
        rows = []
        for row, arm in enumerate(self.arms):
            taught = lessons[row].expand_as(rewards[row])
            if arm.distillation is not None and arm.distillation.only_below is not None:
                taught = taught * low_reward_mask(rewards[row], arm.distillation.only_below)
            rows.append(taught)
        return torch.stack(rows).unsqueeze(-1)


class StepOutput(NamedTuple):
    """Of one optimizer step."""

    losses: Tensor  #: [M], with gradient; members are independent, so their sum serves all
    tensors: dict[str, Tensor]  #: [M, ...], in order of computation, for the finiteness check
    metrics: dict[str, Tensor]  #: [M] each


@torch.no_grad()
def make_batch(
    policy: PopulationPolicy,
    reference: Weights,
    config: RunConfig,
    terms: Terms,
    drawn: Drawn,
    dated: Dated,
    teacher: Teacher | None = None,
) -> Batch:
    r"""Log-probs of the anchors, and advantages of a rollout.

    By default the rewards are normalised within their group first; the KL in the reward is
    subtracted after, so that beta is not divided by the standard deviation of the rewards:

    .. math:: \hat R_t = A - \beta \sum_{s \ge t} k_s \ \text{(to\_go)}, \qquad
        \hat R_t = A - \beta\, k_t \ \text{(immediate)}

    The reward-side distillation is subtracted in the same way.
    """
    rollout, scores = drawn.rollout, drawn.scores
    ref_logits = policy.logits(reference, rollout.prompts, rollout.inputs) / config.temperature
    ref_logp = token_logp(ref_logits, rollout.completions, temperature=1.0)
    mask, old_logp = rollout.mask, rollout.old_logp
    before = terms.kl.completion_penalty(old_logp, ref_logp, mask)
    worth = terms.advantage.worth(scores, mask, before, dated.noise)
    advantages = worth.tokens - terms.kl.penalty(old_logp, ref_logp, mask)
    batch = Batch(
        rollout,
        ref_logits,
        ref_logp,
        worth.rewards,
        worth.tokens[..., 0],
        advantages,
        worth.kept & drawn.done,
        drawn.trained,
        mask.any(dim=-1) if scores.finished is None else scores.finished,
    )
    if teacher is None:
        return batch
    weights = teacher.of_members(len(scores.rewards))
    logits = teacher.policy.logits(weights, rollout.prompts, rollout.inputs) / config.temperature
    logp = token_logp(logits, rollout.completions, temperature=1.0)
    taught = terms.taught(scores.rewards, dated.lessons)
    lesson = taught * terms.distillation.penalty(old_logp, logp, mask)
    return batch._replace(
        advantages=advantages - lesson, teacher_logits=logits, teacher_logp=logp, taught=taught
    )


def compute_step(logits: Tensor, terms: Terms, batch: Batch, *, measure: bool) -> StepOutput:
    """Losses, tensors to check and metrics of the members.

    Args:
        logits: [M, P, G, T, V], at the sampling temperature, with gradient.
        measure: add the metrics of the policy, which read the whole vocabulary.
    """
    old_logp, mask = batch.rollout.old_logp, batch.rollout.mask
    logp = token_logp(logits, batch.rollout.completions, temperature=1.0)
    weights = terms.policy.token_weights(batch, logp.dtype)
    policy = terms.policy.terms(logp, logits, batch, weights)
    kl = terms.kl.loss(Views(logp, old_logp, batch.ref_logp, logits, batch.ref_logits, mask))
    if batch.taught is not None:
        views = Views(logp, old_logp, batch.teacher_logp, logits, batch.teacher_logits, mask)
        kl = kl + batch.taught * terms.distillation.loss(views)
    losses = policy.losses + (weights * kl).flatten(1).sum(dim=1)
    measured = {
        "clip_fraction": metrics.member_mean(policy.clipped.to(logp.dtype), mask),
        "ratio_ess": effective_sample_size(
            policy.log_ratio.flatten(1), torch.zeros_like(logp).flatten(1), mask.flatten(1)
        ),
        "used_fraction": metrics.member_mean(policy.used.to(logp.dtype), mask),
    }
    if measure:
        anchors = (batch.ref_logp, batch.ref_logits, batch.teacher_logits)
        measured |= metrics.policy_metrics(logp, logits, mask, *anchors)
    tensors = {
        "old_logp": old_logp,
        "ref_logp": batch.ref_logp,
        "advantages": batch.advantages,
        "logp": logp,
        "KL loss": kl,
        "loss": losses,
    }
    return StepOutput(losses, {k: v.detach() for k, v in tensors.items()}, measured)
