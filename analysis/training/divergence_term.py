"""The KL terms of a population: for each member the :class:`~analysis.kl.term.KLTerm` of its arm.

The same class serves both anchors: the reference, and the teacher of a distillation. A member
without a term gets exact zeros, not ``0 *`` something that may overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.kl.term import KLTerm
from analysis.training.arms import Arm
from analysis.training.grouping import Groups


class Views(NamedTuple):
    """What a KL term may read: of the policy, of its sampler and of the anchor. M members."""

    logp: Tensor  #: [M, P, G, T], with gradient
    old_logp: Tensor  #: [M, P, G, T]
    anchor_logp: Tensor  #: [M, P, G, T]
    logits: Tensor  #: [M, P, G, T, V], at the sampling temperature, with gradient
    anchor_logits: Tensor  #: [M, P, G, T, V], at the sampling temperature
    mask: Tensor  #: [M, P, G, T]


class Divergence(NamedTuple):
    """A KL term and, of a penalty, its order to the baseline (``Advantage.kl_order``)."""

    term: KLTerm
    order: str = "after"


def reference_divergence(arm: Arm) -> Divergence | None:
    """How the KL to the reference enters; None where it does not, or inside the objective."""
    if arm.kl.estimator == "none" or arm.objective.kind == "grpo_off_policy":
        return None
    return Divergence(arm.kl, arm.advantage.kl_order)


def teacher_divergence(arm: Arm) -> Divergence | None:
    """How the KL to the teacher enters, if it does."""
    return None if arm.distillation is None else Divergence(arm.distillation.kl)


class DivergenceTerm:
    """Which member has which term.

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
        self.placements = {d.term.placement for d in divergences if d is not None}
        self.groups = Groups(divergences, device)
        #: [M, 1, 1, 1]
        self.coefficients = torch.tensor(coefficients, dtype=dtype, device=device)
        self.coefficients = self.coefficients.view(-1, 1, 1, 1)

    def loss(self, views: Views) -> Tensor:
        """[M, P, G, T]: coefficient times each member's KL loss per token, with gradient."""
        if "loss" not in self.placements:
            return torch.zeros_like(views.logp)

        def of_group(divergence: Divergence | None, rows: slice | Tensor) -> Tensor:
            if divergence is None or divergence.term.placement != "loss":
                return torch.zeros_like(views.logp[rows])
            return loss_of(divergence.term, views, rows)

        return self.coefficients * self.groups.map(of_group)

    def penalty(self, old_logp: Tensor, anchor_logp: Tensor, mask: Tensor) -> Tensor:
        """[M, P, G, T]: coefficient times what each token owes, of penalties after the baseline."""

        def owed(term: KLTerm, rows: slice | Tensor) -> Tensor:
            return term.penalty(old_logp[rows], anchor_logp[rows], mask=mask[rows])

        return self.coefficients * self._of_order("after", owed, torch.zeros_like(old_logp))

    def completion_penalty(self, old_logp: Tensor, anchor_logp: Tensor, mask: Tensor) -> Tensor:
        """[M, P, G]: coefficient times what each completion owes, before the baseline."""

        def owed(term: KLTerm, rows: slice | Tensor) -> Tensor:
            return term.completion_penalty(old_logp[rows], anchor_logp[rows], mask=mask[rows])

        nothing = torch.zeros_like(old_logp[..., 0])
        return self.coefficients.squeeze(-1) * self._of_order("before", owed, nothing)

    def _of_order(
        self, order: str, owed: Callable[[KLTerm, slice | Tensor], Tensor], nothing: Tensor
    ) -> Tensor:
        if "reward" not in self.placements:
            return nothing

        def of_group(divergence: Divergence | None, rows: slice | Tensor) -> Tensor:
            if divergence is None or divergence.term.placement != "reward":
                return nothing[rows]
            return owed(divergence.term, rows) if divergence.order == order else nothing[rows]

        return self.groups.map(of_group)


def loss_of(term: KLTerm, views: Views, rows: slice | Tensor) -> Tensor:
    """[m, P, G, T]: the KL loss per token of some members, without coefficient."""
    logits = {}
    if term.reads_logits:
        logits = {"logits": views.logits[rows], "ref_logits": views.anchor_logits[rows]}
    return term.loss(
        views.logp[rows],
        views.anchor_logp[rows],
        old_logp=views.old_logp[rows],
        mask=views.mask[rows],
        **logits,
    )
