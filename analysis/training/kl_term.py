"""The KL term of a population: for each member the estimator and placement of its own arm.

Members are grouped by what they compute; every group is one batched call on its own rows, and its
result is copied into place. A member without a KL term gets exact zeros, not ``0 *`` something
that may overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.kl.divergences import reverse_kl
from analysis.kl.surrogates import kl_loss, kl_penalty
from analysis.objectives.advantages import fold_kl
from analysis.training.config import Arm, Member, RunConfig


class Group(NamedTuple):
    """The members that share an estimator, a placement and a weighting."""

    arm: Arm  #: of any of them; beta is per member, elsewhere
    rows: Tensor  #: their places in the population


class KLTerm:
    """Who computes what, and each member's beta."""

    def __init__(self, members: Sequence[Member], dtype: torch.dtype, device: torch.device) -> None:
        rows: dict[str, list[int]] = {}
        for row, member in enumerate(members):
            rows.setdefault(member.arm.name, []).append(row)
        groups = [Group(members[r[0]].arm, torch.tensor(r, device=device)) for r in rows.values()]
        active = [group for group in groups if group.arm.kl_estimator != "none"]
        self.loss_groups = [g for g in active if g.arm.kl_placement == "loss"]
        self.reward_groups = [g for g in active if g.arm.kl_placement == "reward"]
        #: [M, 1, 1, 1]
        betas = [member.arm.beta for member in members]
        self.beta = torch.tensor(betas, dtype=dtype, device=device).view(-1, 1, 1, 1)

    def loss(
        self,
        logp: Tensor,
        ref_logp: Tensor,
        old_logp: Tensor,
        logits: Tensor,
        ref_logits: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """[M, P, G, T]: beta times each member's KL loss per token, with gradient.

        ``logits`` and ``ref_logits`` are at the sampling temperature; only the exact KL reads them.
        """
        terms = torch.zeros_like(logp)
        for arm, rows in self.loss_groups:
            if arm.kl_estimator == "exact":
                term = reverse_kl(logits[rows], ref_logits[rows])
            else:
                term = kl_loss(
                    logp[rows],
                    ref_logp[rows],
                    old_logp[rows],
                    estimator=arm.kl_estimator,
                    weighting=arm.kl_weighting,
                    mask=mask[rows],
                )
            terms = terms.index_copy(0, rows, term)
        return self.beta * torch.where(mask, terms, 0.0)

    def penalty(self, old_logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
        """[M, P, G, T]: beta times each member's penalty in the reward per token, detached."""
        terms = torch.zeros_like(old_logp)
        for arm, rows in self.reward_groups:
            term = kl_penalty(
                old_logp[rows], ref_logp[rows], estimator=arm.kl_estimator, mask=mask[rows]
            )
            terms = terms.index_copy(0, rows, term)
        return self.beta * terms

    def share(self, config: RunConfig, old_logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
        """[M, P, G, T]: what the KL in the reward adds to the advantages, with its credit."""
        penalty = self.penalty(old_logp, ref_logp, mask)
        nothing = torch.zeros_like(penalty)
        return fold_kl(nothing, penalty, mask, beta=1.0, credit=config.kl_credit)
