"""What moves while a run trains, beside its weights: its reference, its coefficient, its control.

All stay where they are in memory and change in place, so that what is recorded as a graph reads
their new values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from analysis.records.config import Run
from analysis.records.variants import Controller, MovingReference
from analysis.training.environment import PopulationPolicy
from analysis.training.graphs import Launch
from analysis.training.metrics import run_mean
from analysis.training.population import Groups, Rows
from analysis.training.rollout import Batch
from kl_term.kl.control import ControlFit
from kl_term.kl.estimators import TOKEN_ESTIMATORS

#: Of the proportional rule: Ziegler et al. (2019).
CLIP = 0.2


class References:
    """The reference of each run.

    Args:
        start: [M, N] or [1, N], the weights before the first update.
        runs: M.
    """

    def __init__(self, policy: PopulationPolicy, start: Tensor, runs: Sequence[Run]) -> None:
        moves = [run.variant.reference for run in runs]
        #: That of the first update.
        self.first = self.current = policy.reference(start, len(runs))
        self.groups: Groups[MovingReference | None] = Groups(moves, start.device)
        #: [M, N], the weights of references that move; None where none does.
        self.weights: Tensor | None = None
        if any(moves):
            self.weights = start.expand(len(runs), -1).clone()
            self.current = policy.unflatten(self.weights)

    @torch.no_grad()
    def follow(self, weights: Tensor, done: int) -> None:
        """Average with the policy's weights [M, N], where that is due after so many updates."""
        for move, rows, _ in self.groups:
            if move is not None and done % move.every == 0:
                kept = self.weights[rows]
                self.weights[rows] = torch.lerp(kept, weights.detach()[rows], move.weight)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds."""
        return {} if self.weights is None else {"reference": self.weights}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of :meth:`state`."""
        for name, tensor in self.state().items():
            tensor.copy_(tensors[name])


class Controllers:
    """The coefficient of each run, where a controller moves it.

    Args:
        coefficients: [M, 1, 1, 1], changed in place.
    """

    def __init__(self, runs: Sequence[Run], coefficients: Tensor) -> None:
        self.coefficients = coefficients
        controllers = [run.variant.controller for run in runs]
        self.groups: Groups[Controller | None] = Groups(controllers, coefficients.device)
        self.active = any(controllers)

    def measured(self, batch: Batch) -> Tensor:
        """[M]: the KL that each run's controller reads off a rollout; NaN where there is none."""
        rollout = batch.rollout

        def of_group(controller: Controller | None, rows: Rows) -> Tensor:
            logp, ref_logp = rollout.old_logp[rows], batch.ref_logp[rows]
            if controller is None:
                return logp.new_full((len(logp),), math.nan)
            values = TOKEN_ESTIMATORS[controller.reads].value(logp, ref_logp)
            return run_mean(values, rollout.mask[rows])

        return self.groups.map(of_group)

    def step(self, batch: Batch, launch: Launch) -> None:
        """Move the coefficients by what the rollout shows."""
        self.coefficients.copy_(launch("controllers", self.moved, batch).view_as(self.coefficients))

    def moved(self, batch: Batch) -> Tensor:
        """[M]: the coefficients after a rollout."""
        read, now = self.measured(batch), self.coefficients.flatten()
        return self.groups.map(lambda controller, rows: _next(controller, now[rows], read[rows]))

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds."""
        return {"coefficients": self.coefficients} if self.active else {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of :meth:`state`."""
        for name, tensor in self.state().items():
            tensor.copy_(tensors[name])


class Controls:
    """The weight of each run's control variate, where the batches before fit it.

    Args:
        fitted: [M], is that of a run?
        weights: [M, 1, 1, 1], changed in place.
    """

    def __init__(self, fitted: Sequence[bool], weights: Tensor) -> None:
        self.weights = weights
        self.active = any(fitted)
        self._fitted = torch.tensor(fitted, device=weights.device).view_as(weights)
        self.fit = ControlFit(len(fitted), device=weights.device)

    def add(self, sums: Tensor | None) -> None:
        """Sums [M, 2] of an optimizer step, if any weight is fitted."""
        if sums is not None:
            self.fit.add(sums)

    def step(self) -> None:
        """The rollout is over: move the weights by what it showed."""
        if self.active:
            self.fit.advance()
            self._move()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds."""
        return {"control_sums": self.fit.sums} if self.active else {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of :meth:`state`."""
        if self.active:
            self.fit.sums.copy_(tensors["control_sums"])
            self._move()

    def _move(self) -> None:
        weight = self.fit.weight.view_as(self.weights).to(self.weights)
        self.weights.copy_(torch.where(self._fitted, weight, self.weights))


class LateTerms:
    """The coefficient of each run whose KL term comes late: zero until then.

    It follows from the number of the update, so a checkpoint holds nothing of it.

    Args:
        coefficients: [M, 1, 1, 1], those of the variants; changed in place.
    """

    def __init__(self, runs: Sequence[Run], coefficients: Tensor) -> None:
        firsts = [run.variant.kl_from for run in runs]
        self.coefficients = coefficients
        self.betas = coefficients.clone()
        #: [M, 1, 1, 1], the first update with a term.
        self.firsts = torch.tensor(firsts, device=coefficients.device).view_as(coefficients)
        self.active = any(firsts)

    def switch(self, update: int) -> None:
        """Set the coefficients of late terms for an update; the others' stay as they are."""
        if self.active:
            scheduled = torch.where(self.firsts <= update, self.betas, 0.0)
            late = self.firsts > 0
            self.coefficients.copy_(torch.where(late, scheduled, self.coefficients))


def _next(controller: Controller | None, beta: Tensor, kl: Tensor) -> Tensor:
    """[m]: one step of :mod:`kl_term.objectives.controllers`, of tensors."""
    if controller is None:
        return beta
    target = controller.target
    if controller.rule == "proportional":
        return beta * (1 + (kl / target - 1).clamp(-CLIP, CLIP) / controller.horizon)
    if controller.rule == "multiplier":
        return (beta + controller.rate * (kl - target)).clamp(min=0.0)
    factor = torch.where(kl > 1.5 * target, 2.0, 1.0)
    return beta * torch.where(kl < target / 1.5, 0.5, factor).to(beta)
