"""The policy term of a population: for each member the objective and correction of its own arm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.kl.truncation import masked_logits
from analysis.objectives.aggregation import token_weights
from analysis.objectives.losses import policy_loss
from analysis.objectives.masking import off_policy_sequence_mask
from analysis.objectives.merged import merged_loss, merged_reward
from analysis.objectives.mirror_descent import mirror_descent_loss
from analysis.objectives.mismatch import mismatch_weight
from analysis.objectives.preference import dpo_loss
from analysis.training.arms import Correction, Objective
from analysis.training.batch import Batch
from analysis.training.config import Member
from analysis.training.grouping import Groups
from analysis.training.rollout import token_logp


class Key(NamedTuple):
    """What members of one group share."""

    objective: Objective
    correction: Correction
    #: Coefficient of the KL that the objective itself holds.
    beta: float


class PolicyTerms(NamedTuple):
    """Of one optimizer step. M members."""

    losses: Tensor  #: [M], with gradient
    log_ratio: Tensor  #: [M, P, G, T], of the policy to its sampler, no gradient; 0 where masked
    clipped: Tensor  #: [M, P, G, T] bool, where the clip changes the gradient
    used: Tensor  #: [M, P, G, T] bool, counted tokens whose policy term is not left out


class PolicyTerm:
    """Who optimises what."""

    def __init__(self, members: Sequence[Member], device: torch.device) -> None:
        self.groups = Groups([_key(member) for member in members], device)
        self.aggregations = Groups([m.arm.objective.aggregation for m in members], device)

    def token_weights(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """[M, P, G, T]: weights within each member, of means over the kept groups alone.

        Tokens that are not trained on count in the means and weigh nothing.
        """
        counted = batch.rollout.mask & batch.kept[..., None, None]

        def of_mode(mode: str, rows: slice | Tensor) -> Tensor:
            weights = torch.vmap(partial(token_weights, mode=mode, dtype=dtype))(counted[rows])
            if mode == "token_mean":
                return weights
            return weights * shares(batch.kept[rows], dtype)[..., None, None]

        return self.aggregations.map(of_mode) * batch.trained

    def terms(self, logp: Tensor, logits: Tensor, batch: Batch, weights: Tensor) -> PolicyTerms:
        """Losses of all members.

        Args:
            logp: [M, P, G, T], of the sampled tokens, with gradient.
            logits: [M, P, G, T, V], at the sampling temperature, with gradient.
            weights: [M, P, G, T], of each token in the loss.
        """
        parts = [
            of_group(group.key, logp[group.rows], logits, batch.of(group.rows), weights, group.rows)
            for group in self.groups
        ]
        return PolicyTerms(*(self.groups.join(tensors) for tensors in zip(*parts, strict=True)))


def shares(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, P]: what turns a mean over all groups into one over the kept ones."""
    weights = kept.to(dtype)
    return weights * (kept.shape[-1] / weights.sum(dim=-1, keepdim=True).clamp(min=1))


def of_group(
    key: Key, logp: Tensor, logits: Tensor, batch: Batch, weights: Tensor, rows: slice | Tensor
) -> PolicyTerms:
    """The terms of members with one key; ``logits`` and ``weights`` are of the whole population."""
    objective, correction, _ = key
    rollout, weights = batch.rollout, weights[rows]
    old_logp, mask = rollout.old_logp, rollout.mask
    if correction.keep_sampling_mask:
        kept = masked_logits(logits[rows], rollout.keep.expand_as(logits[rows]))
        logp, old_logp = token_logp(kept, rollout.completions, 1.0), rollout.sampler_logp
    log_ratio = torch.where(mask, logp.detach() - old_logp, 0.0)
    if objective.kind in ("mirror_descent", "dpo"):
        losses = completion_losses(objective, logp, old_logp, batch)
        return PolicyTerms(losses, log_ratio, torch.zeros_like(mask), mask)
    used = mask & (weights != 0)
    if correction.mask_truncated:
        used = used & batch.finished.unsqueeze(-1)
    if correction.sequence_mask_delta is not None:
        used = used & off_policy_sequence_mask(
            logp, old_logp, batch.outcomes, mask, delta=correction.sequence_mask_delta
        )
    per_token, clipped = _token_terms(key, logp, old_logp, batch)
    if correction.mismatch != "none":
        factors = mismatch_weight(
            old_logp,
            rollout.sampler_logp,
            mask,
            kind=correction.mismatch,
            bound=correction.bound,
            level=correction.mismatch_level,
        )
        per_token, used = per_token * factors, used & (factors > 0)
    losses = (weights * torch.where(used, per_token, 0.0)).flatten(1).sum(dim=1)
    return PolicyTerms(losses, log_ratio, clipped, used)


def completion_losses(objective: Objective, logp: Tensor, old_logp: Tensor, batch: Batch) -> Tensor:
    """[m]: mean over prompts of an objective on whole completions."""
    mask, rewards = batch.rollout.mask, batch.rewards
    whole, old = (torch.where(mask, part, 0.0).sum(dim=-1) for part in (logp, old_logp))
    if objective.kind == "mirror_descent":
        baseline = rewards.mean(dim=-1, keepdim=True).expand_as(rewards)
        losses = mirror_descent_loss(whole, old, rewards, baseline, tau=objective.tau)
        return (shares(batch.kept, losses.dtype).unsqueeze(-1) * losses).flatten(1).mean(dim=1)
    anchor = torch.where(mask, batch.ref_logp, 0.0).sum(dim=-1)
    best, worst = rewards.argmax(dim=-1, keepdim=True), rewards.argmin(dim=-1, keepdim=True)
    chosen = (part.gather(-1, place) for place in (best, worst) for part in (whole, anchor))
    logp_w, ref_logp_w, logp_l, ref_logp_l = chosen
    losses = dpo_loss(logp_w, logp_l, ref_logp_w, ref_logp_l, beta=objective.tau)
    differs = rewards.gather(-1, best) > rewards.gather(-1, worst)
    losses = torch.where(differs, losses, 0.0).squeeze(-1)
    return (shares(batch.kept, losses.dtype) * losses).mean(dim=1)


def _token_terms(key: Key, logp: Tensor, old_logp: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Per-token loss and where it is clipped."""
    objective, mask = key.objective, batch.rollout.mask
    clip = {"epsilon_low": objective.epsilon_low, "epsilon_high": objective.epsilon_high}
    if objective.kind != "grpo_off_policy" or key.beta == 0.0:
        output = policy_loss(
            logp,
            old_logp=old_logp,
            advantages=batch.advantages,
            mask=mask,
            kind=objective.kind,
            **clip,
        )
        return output.per_token, output.clipped
    kl = {"beta": key.beta, "reading": objective.reading}
    inputs = (logp, batch.ref_logp, old_logp, batch.advantages, mask)
    merged = merged_reward(*inputs, **kl).detach()
    output = policy_loss(
        logp.detach(), old_logp=old_logp, advantages=merged, mask=mask, kind=objective.kind, **clip
    )
    return merged_loss(*inputs, **kl, **clip), output.clipped


def _key(member: Member) -> Key:
    arm = member.arm
    beta = arm.beta if arm.objective.kind == "grpo_off_policy" else 0.0
    return Key(arm.objective, arm.correction, beta)
