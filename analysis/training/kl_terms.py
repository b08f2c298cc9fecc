"""The KL to the reference, or to the teacher of a distillation, of each run of a population.

Runs whose variants agree in it are computed together, in groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.records.variants import (
    Truncation,
)
from analysis.training.population import Groups, Rows
from analysis.training.rollout import Batch
from kl_term.kl.choice import KLChoice
from kl_term.kl.control import control_sums
from kl_term.kl.term import KLTerm
from kl_term.kl.truncated_prefix import truncated_prefix_coefficients


class Views(NamedTuple):
    """What a KL may read: of the policy, of its sampler, and of its target. M runs.

    The target is the reference, or the teacher.
    """

    logp: Tensor  #: [M, P, G, T], with gradient
    old_logp: Tensor  #: [M, P, G, T]
    target_logp: Tensor  #: [M, P, G, T]
    logits: Tensor  #: [M, P, G, T, V], at the sampling temperature, with gradient
    target_logits: Tensor  #: [M, P, G, T, V], at the sampling temperature
    mask: Tensor  #: [M, P, G, T]
    on: Tensor | None = None  #: [M, P, G, 1] bool, completions on which it acts; None = all

    @classmethod
    def of(cls, logp: Tensor, logits: Tensor, batch: Batch, *, teacher: bool = False) -> Views:
        """The policy's log-probs and logits beside those of a batch."""
        target, on = (batch.ref_logp, batch.ref_logits), batch.kl_on
        if teacher:
            target, on = (batch.teacher_logp, batch.teacher_logits), None
        rollout = batch.rollout
        return cls(logp, rollout.old_logp, target[0], logits, target[1], rollout.mask, on)


class TermKey(NamedTuple):
    """What runs share whose KL term is computed together."""

    term: KLTerm
    order: str
    truncation: Truncation | None


class KLTerms:
    """The KL term of each run.

    Args:
        choices: one a run; None for a run that has none, or has it inside its objective.
        orders: one a run: is a penalty subtracted ``after`` the baseline, or ``before`` it?
        coefficients: one a run.
        truncations: one a run, of the ratio of its loss; by default none has one.
    """

    def __init__(
        self,
        choices: Sequence[KLChoice | None],
        orders: Sequence[str],
        coefficients: Sequence[float],
        dtype: torch.dtype,
        device: torch.device,
        truncations: Sequence[Truncation | None] | None = None,
    ) -> None:
        terms = [choice and KLTerm(**dict(choice)) for choice in choices]
        self.placements = {term.placement for term in terms if term is not None}
        parts = zip(terms, orders, truncations or [None] * len(terms), strict=True)
        keys = [None if part[0] is None else TermKey(*part) for part in parts]
        self.groups: Groups[TermKey | None] = Groups(keys, device)
        #: [M, 1, 1, 1]
        self.coefficients = torch.tensor(coefficients, dtype=dtype, device=device)
        self.coefficients = self.coefficients.view(-1, 1, 1, 1)
        #: [M], is the weight of a run's control variate fitted? And what it is now, [M, 1, 1, 1].
        self.fitted = [term is not None and term.control == "fitted" for term in terms]
        numbers = [1.0 if t is None or t.control == "fitted" else t.control for t in terms]
        self.controls = torch.tensor(numbers, dtype=dtype, device=device).view(-1, 1, 1, 1)

    def loss(self, views: Views) -> Tensor:
        """[M, P, G, T]: coefficient times each run's KL loss per token, with gradient."""

        def of_group(key: TermKey, rows: Rows) -> Tensor:
            logits = {}
            if key.term.reads_logits:
                logits = {"logits": views.logits[rows], "ref_logits": views.target_logits[rows]}
            logp, target_logp = views.logp[rows], views.target_logp[rows]
            old_logp, mask = views.old_logp[rows], views.mask[rows]
            if key.truncation is not None:
                return truncated_loss(key.truncation, logp, target_logp, old_logp, mask)
            return key.term.loss(
                logp,
                target_logp,
                old_logp=old_logp,
                mask=mask,
                control=self.controls[rows],
                **logits,
            )

        if "loss" not in self.placements:
            return torch.zeros_like(views.logp)
        return self.coefficients * acting(self._map("loss", None, of_group, views.logp), views.on)

    def control_sums(self, views: Views) -> Tensor | None:
        """[M, 2]: what a batch says of the weights of later ones; None where none is fitted."""
        if not any(self.fitted):
            return None
        with torch.no_grad():
            sampled = (views.logp, views.target_logp, views.old_logp)
            return control_sums(*sampled, views.mask).flatten(1, 2).sum(1)

    def penalty(
        self, old_logp: Tensor, target_logp: Tensor, mask: Tensor, on: Tensor | None = None
    ) -> Tensor:
        """[M, P, G, T]: coefficient times the KL to go, of penalties after the baseline.

        ``on`` [M, P, G, 1] bool says on which completions they act; None = on all.
        """

        def of_group(key: TermKey, rows: Rows) -> Tensor:
            return key.term.penalty(old_logp[rows], target_logp[rows], mask=mask[rows])

        return self.coefficients * acting(self._map("reward", "after", of_group, old_logp), on)

    def completion_penalty(
        self, old_logp: Tensor, target_logp: Tensor, mask: Tensor, on: Tensor | None = None
    ) -> Tensor:
        """[M, P, G]: coefficient times the KL of completions, of penalties before the baseline;
        ``on`` as in :meth:`penalty`."""

        def of_group(key: TermKey, rows: Rows) -> Tensor:
            return key.term.completion_penalty(old_logp[rows], target_logp[rows], mask=mask[rows])

        coefficients = self.coefficients.squeeze(-1)
        whole = self._map("reward", "before", of_group, old_logp[..., 0])
        return coefficients * acting(whole, None if on is None else on.squeeze(-1))

    def _map(
        self,
        placement: str,
        order: str | None,
        function: Callable[[TermKey, Rows], Tensor],
        like: Tensor,
    ) -> Tensor:
        """A function of the groups of one placement and order; zeros for the others."""
        if placement not in self.placements:
            return torch.zeros_like(like)

        def of_group(key: TermKey | None, rows: Rows) -> Tensor:
            if key is None or key.term.placement != placement or order not in (None, key.order):
                return torch.zeros_like(like[rows])
            return function(key, rows)

        return self.groups.map(of_group)


def truncated_loss(
    truncation: Truncation, logp: Tensor, ref_logp: Tensor, old_logp: Tensor, mask: Tensor
) -> Tensor:
    """[m, P, G, T]: what has, under weights that the tokens of a completion share, the gradient of
    k3 under a truncated prefix ratio; its value is no KL."""
    cap = math.inf if truncation.cap is None else truncation.cap
    coefficients = truncated_prefix_coefficients(
        logp, ref_logp, old_logp, mask, cap=cap, window=truncation.window
    )
    return torch.where(mask, coefficients * logp, 0.0)


def acting(values: Tensor, on: Tensor | None) -> Tensor:
    """KLs where they act, 0 elsewhere; all of them where ``on`` is None."""
    return values if on is None else torch.where(on, values, 0.0)
