"""The policy objective of each run of a population.

Runs whose variants agree in it are computed together, in groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.records.config import Run
from analysis.records.variants import (
    Correction,
    Objective,
)
from analysis.training.population import Groups, Rows
from analysis.training.rollout import Batch, token_logp
from kl_term.kl.truncation import masked_logits
from kl_term.objectives.aggregation import token_weights
from kl_term.objectives.losses import policy_loss
from kl_term.objectives.masking import off_policy_sequence_mask
from kl_term.objectives.merged import merged_loss, merged_reward
from kl_term.objectives.mirror_descent import mirror_descent_loss
from kl_term.objectives.mismatch import mismatch_weight
from kl_term.objectives.preference import dpo_loss


class Key(NamedTuple):
    """What runs of one group share."""

    objective: Objective
    correction: Correction
    #: Coefficient of the KL that the objective itself holds.
    beta: float


class PolicyLoss(NamedTuple):
    """Of one optimizer step. M runs."""

    losses: Tensor  #: [M], with gradient
    log_ratio: Tensor  #: [M, P, G, T], of the policy to its sampler, no gradient; 0 where masked
    clipped: Tensor  #: [M, P, G, T] bool, where the clip changes the gradient
    used: Tensor  #: [M, P, G, T] bool, counted tokens whose policy term is not left out


class PolicyTerms:
    """The objective and correction of each run."""

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        self.groups = Groups([_key(run) for run in runs], device)
        self.aggregations = Groups([m.variant.objective.aggregation for m in runs], device)

    def token_weights(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """[M, P, G, T]: weights within each run, of means over the kept groups alone.

        Tokens that are not trained on count in the means and weigh nothing.
        """
        counted = batch.rollout.mask & batch.kept[..., None, None]

        def of_mode(mode: str, rows: Rows) -> Tensor:
            weights = torch.vmap(partial(token_weights, mode=mode, dtype=dtype))(counted[rows])
            if mode == "token_mean":
                return weights
            return weights * shares(batch.kept[rows], dtype)[..., None, None]

        return self.aggregations.map(of_mode) * batch.trained

    def loss(self, logp: Tensor, logits: Tensor, batch: Batch, weights: Tensor) -> PolicyLoss:
        """Losses of all runs.

        Args:
            logp: [M, P, G, T], of the sampled tokens, with gradient.
            logits: [M, P, G, T, V], at the sampling temperature, with gradient.
            weights: [M, P, G, T], of each token in the loss.
        """
        parts = [
            _policy_loss(key, logp[rows], logits, batch.of_runs(rows), weights, rows)
            for key, rows, _ in self.groups
        ]
        return PolicyLoss(*(self.groups.join(tensors) for tensors in zip(*parts, strict=True)))


def shares(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, P]: what turns a mean over all groups into one over the kept ones."""
    weights = kept.to(dtype)
    return weights * (kept.shape[-1] / weights.sum(dim=-1, keepdim=True).clamp(min=1))


def _policy_loss(
    key: Key, logp: Tensor, logits: Tensor, batch: Batch, weights: Tensor, rows: Rows
) -> PolicyLoss:
    """The terms of runs with one key; ``logits`` and ``weights`` are of the whole population."""
    objective, correction, _ = key
    rollout, weights = batch.rollout, weights[rows]
    old_logp, mask = rollout.old_logp, rollout.mask
    if correction.keep_sampling_mask:
        kept = masked_logits(logits[rows], rollout.keep.expand_as(logits[rows]))
        logp, old_logp = token_logp(kept, rollout.completions, 1.0), rollout.sampler_logp
    log_ratio = torch.where(mask, logp.detach() - old_logp, 0.0)
    if objective.kind in ("mirror_descent", "dpo"):
        losses = completion_losses(objective, logp, old_logp, batch)
        return PolicyLoss(losses, log_ratio, torch.zeros_like(mask), mask)
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
    return PolicyLoss(losses, log_ratio, clipped, used)


def completion_losses(objective: Objective, logp: Tensor, old_logp: Tensor, batch: Batch) -> Tensor:
    """[m]: mean over prompts of an objective on whole completions."""
    mask, rewards = batch.rollout.mask, batch.rewards
    whole, old = (torch.where(mask, part, 0.0).sum(dim=-1) for part in (logp, old_logp))
    if objective.kind == "mirror_descent":
        baseline = rewards.mean(dim=-1, keepdim=True).expand_as(rewards)
        losses = mirror_descent_loss(whole, old, rewards, baseline, tau=objective.tau)
        return (shares(batch.kept, losses.dtype).unsqueeze(-1) * losses).flatten(1).mean(dim=1)
    reference = torch.where(mask, batch.ref_logp, 0.0).sum(dim=-1)
    best, worst = rewards.argmax(dim=-1, keepdim=True), rewards.argmin(dim=-1, keepdim=True)
    chosen = (part.gather(-1, place) for place in (best, worst) for part in (whole, reference))
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


def _key(run: Run) -> Key:
    variant = run.variant
    beta = variant.beta if variant.separate_kl is None else 0.0
    return Key(variant.objective, variant.correction, beta)
