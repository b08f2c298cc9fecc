"""The KL terms of a population: for each member the estimator and placement of its own arm.

The same class serves both anchors: the reference, and the teacher of a distillation. A member
without a term gets exact zeros, not ``0 *`` something that may overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.kl.divergences import forward_kl, reverse_kl
from analysis.kl.surrogates import kl_loss, kl_penalty, straight_through
from analysis.objectives.credit import reward_to_go
from analysis.training.arms import Arm
from analysis.training.grouping import Groups


class Divergence(NamedTuple):
    """How a KL to an anchor enters, apart from its coefficient."""

    estimator: str
    placement: str
    weighting: str
    level: str
    credit: str
    #: Of a penalty in the reward, to the baseline: see :class:`analysis.training.arms.Advantage`.
    order: str
    #: Estimator that a straight-through loss reports.
    value: str | None


class Views(NamedTuple):
    """What a KL term may read: of the policy, of its sampler and of the anchor. M members."""

    logp: Tensor  #: [M, P, G, T], with gradient
    old_logp: Tensor  #: [M, P, G, T]
    anchor_logp: Tensor  #: [M, P, G, T]
    logits: Tensor  #: [M, P, G, T, V], at the sampling temperature, with gradient
    anchor_logits: Tensor  #: [M, P, G, T, V], at the sampling temperature
    mask: Tensor  #: [M, P, G, T]


def reference_divergence(arm: Arm) -> Divergence | None:
    """How the KL to the reference enters; None where it does not, or inside the objective."""
    if arm.kl_estimator == "none" or arm.objective.kind == "grpo_off_policy":
        return None
    return Divergence(
        arm.kl_estimator,
        arm.kl_placement,
        arm.kl_weighting,
        arm.kl_level,
        arm.kl_credit,
        arm.advantage.kl_order,
        arm.kl_value,
    )


def teacher_divergence(arm: Arm) -> Divergence | None:
    """How the KL to the teacher enters, if it does."""
    part = arm.distillation
    if part is None:
        return None
    return Divergence(
        part.estimator, part.placement, part.weighting, "token", part.credit, "after", None
    )


class DivergenceTerm:
    """Who computes what.

    Args:
        divergences: one a member.
        coefficients: one a member.
    """

    def __init__(
        self,
        divergences: Sequence[Divergence | None],
        coefficients: Sequence[float],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.placements = {d.placement for d in divergences if d is not None}
        self.groups = Groups(divergences, device)
        #: [M, 1, 1, 1]
        self.coefficients = torch.tensor(coefficients, dtype=dtype, device=device)
        self.coefficients = self.coefficients.view(-1, 1, 1, 1)

    def loss(self, views: Views) -> Tensor:
        """[M, P, G, T]: coefficient times each member's KL loss per token, with gradient."""
        if "loss" not in self.placements:
            return torch.zeros_like(views.logp)

        def of_group(divergence: Divergence | None, rows: slice | Tensor) -> Tensor:
            if divergence is None or divergence.placement != "loss":
                return torch.zeros_like(views.logp[rows])
            return loss_of(divergence, views, rows)

        terms = self.groups.map(of_group)
        return self.coefficients * torch.where(views.mask, terms, 0.0)

    def penalty(
        self, old_logp: Tensor, anchor_logp: Tensor, mask: Tensor, *, order: str = "after"
    ) -> Tensor:
        """[M, P, G, T]: coefficient times what each token owes in the reward, detached.

        With ``to_go`` credit a token owes the penalties of all that follow, with a penalty at
        sequence level that of the completion. Only those with this ``order`` to the baseline; with
        ``before`` a token owes its own, so that the sum over a completion is its penalty.
        """
        if "reward" not in self.placements:
            return torch.zeros_like(old_logp)

        def of_group(divergence: Divergence | None, rows: slice | Tensor) -> Tensor:
            logp, anchor, counted = old_logp[rows], anchor_logp[rows], mask[rows]
            if divergence is None or (divergence.placement, divergence.order) != ("reward", order):
                return torch.zeros_like(logp)
            if divergence.level == "sequence":
                value = kl_penalty(
                    _row_sum(logp, counted),
                    _row_sum(anchor, counted),
                    estimator=divergence.estimator,
                )
                shares = 1 if order == "after" else counted.sum(-1, keepdim=True).clamp(min=1)
                return torch.where(counted, value / shares, 0.0)
            own = kl_penalty(logp, anchor, estimator=divergence.estimator, mask=counted)
            if divergence.credit == "to_go" and order == "after":
                return torch.where(counted, reward_to_go(own), 0.0)
            return own

        return self.coefficients * self.groups.map(of_group)


def loss_of(divergence: Divergence, views: Views, rows: slice | Tensor) -> Tensor:
    """[m, P, G, T]: the KL loss per token of some members, without coefficient."""
    estimator = divergence.estimator
    if estimator == "exact":
        return reverse_kl(views.logits[rows], views.anchor_logits[rows])
    if estimator == "forward":
        return forward_kl(views.logits[rows], views.anchor_logits[rows])
    logp, anchor_logp, mask = views.logp[rows], views.anchor_logp[rows], views.mask[rows]
    if estimator == "cross_entropy":
        return -logp
    old_logp = views.old_logp[rows]
    if divergence.level == "sequence":
        logp, anchor_logp, old_logp = (
            _row_sum(part, mask) for part in (logp, anchor_logp, old_logp)
        )
        mask = mask.any(dim=-1, keepdim=True)
    options = {"weighting": divergence.weighting, "mask": mask}
    loss = kl_loss(logp, anchor_logp, old_logp, estimator=estimator, **options)
    if divergence.value is not None:
        value = kl_loss(logp, anchor_logp, old_logp, estimator=divergence.value, **options)
        loss = straight_through(value, loss)
    return loss.expand_as(views.logp[rows])


def _row_sum(values: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, values, 0.0).sum(dim=-1, keepdim=True)
