"""Policy-gradient training of a whole population: every run in the same batched operations.

One update: sample completions, verify them, turn rewards into advantages, subtract the KL of the
variants that have it in the reward, then take one or more optimizer steps on the policy term plus
the KL of the variants that have it in the loss. Runs share no state but the frozen reference and
teacher: run i of a population is, bit for bit on the CPU, the run it would be alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from analysis.records.config import Run, RunConfig, TrainConfig
from analysis.records.metrics import POLICY_METRICS
from analysis.records.run_record import Failure, RunRecord
from analysis.training.cpu import keep_freed_memory
from analysis.training.environment import Environment, Weights, starts_of
from analysis.training.final_policy import final_metrics
from analysis.training.graphs import launcher
from analysis.training.loss import (
    StepOutput,
    Terms,
    compute_step,
    kl_cosine,
    kl_objectives,
    make_batch,
)
from analysis.training.metrics import elementwise_mean, rollout_metrics
from analysis.training.moving import Controllers, Controls, LateTerms, References
from analysis.training.optimizer import PopulationAdamW, clip_rows
from analysis.training.rollout import Batch, at_temperature
from analysis.training.sampling import Caches, SampledBatch, Samplers
from analysis.training.tiny.start import tiny_environment
from kl_term.checks import trusted


class TrainerState(NamedTuple):
    """All that the rest of a run depends on; its randomness is keyed by seed and update."""

    update: int  #: updates done
    tensors: dict[str, Tensor]
    failures: tuple[Failure, ...]
    wall_seconds: float


class PopulationTrainer:
    """Weights, optimizer and bookkeeping of a population.

    Args:
        config: what all runs share.
        runs: one run each.
        environment: policy, task and start; by default the tiny ones that ``config`` describes. Its
            device is that of the run.
        graphs: launch each phase of an update as a whole, on a GPU: see
            :mod:`analysis.training.graphs`. Numbers do not depend on it.

    Raises:
        ValueError: if ``runs`` is empty, there is no environment for ``config``, or its device has
            no graphs.
    """

    def __init__(
        self,
        config: RunConfig,
        runs: Sequence[Run],
        environment: Environment | None = None,
        *,
        graphs: bool = False,
    ) -> None:
        if not runs:
            raise ValueError("runs is empty: give at least one")
        if environment is None:
            if not isinstance(config, TrainConfig):
                raise ValueError(f"environment is missing: {type(config).__name__} describes none")
            environment = tiny_environment(config)
        keep_freed_memory()
        self.config = config
        self.runs = tuple(runs)
        #: Names of what every update logs; all but those of the policy are cheap.
        self.logs = config.logs
        self._cheap = [name for name in self.logs if name not in POLICY_METRICS]
        self.policy, self.teacher = environment.policy, environment.teacher
        self.device = environment.start.device
        size, starts = len(self.runs), len(environment.start)
        start = environment.start[starts_of([run.seed for run in self.runs], environment)]
        first = environment.start if starts == 1 else start
        self.references = References(self.policy, first, self.runs)
        self.weights = start.clone().requires_grad_()
        has_teacher = environment.teacher is not None
        self.terms = Terms(config, self.runs, self.device, has_teacher=has_teacher)
        self.controllers = Controllers(self.runs, self.terms.kl.coefficients)
        self.controls = Controls(self.terms.kl.fitted, self.terms.kl.controls)
        self.late_terms = LateTerms(self.runs, self.terms.kl.coefficients)
        self.launch = launcher(self.device, graphs=graphs, fixed=[self.weights])
        one_step = config.num_minibatches == 1
        self.samplers = Samplers(config, self.runs, environment, self.launch, keep=one_step)
        self.optimizer = PopulationAdamW(self.weights, config.learning_rate, config.weight_decay)
        self.alive = torch.ones(size, dtype=torch.bool, device=self.device)
        self.frozen = torch.zeros(0, dtype=torch.long, device=self.device)  #: the others' places
        self.failures: list[Failure] = []
        #: Of each update done; metrics of the policy only where a logging window begins.
        self.logged: list[dict[str, Tensor]] = []
        self.wall_seconds = 0.0

    @property
    def done(self) -> int:
        """Updates done."""
        return len(self.logged)

    @property
    def reference(self) -> Weights:
        """The reference of each run, as it is now."""
        return self.references.current

    @property
    def _moving(self) -> tuple[References | Controllers | Controls, ...]:
        """What moves beside the weights."""
        return self.references, self.controllers, self.controls

    def rollout(self, update: int) -> SampledBatch:
        """Sampled completions of every run, and what the verifier says of them."""
        self.samplers.remember(self.weights)
        return self.samplers.sample(update)

    def batch(self, sampled: SampledBatch, update: int = 0, *, measure: bool = True) -> Batch:
        """The rollout with all that stays fixed while it is trained on."""
        of_run = (self.policy, self.references.current, self.config, self.terms)
        ensembles = self.samplers.ensembles
        moved = measure and self.references.weights is not None
        first = self.references.first if moved else None
        make = partial(make_batch, *of_run, teacher=self.teacher, first=first, ensembles=ensembles)
        context = self.terms.context(update, sampled.scores.rewards)
        return self.launch(("batch", moved), make, sampled, context)

    def update(self, update: int, *, measure: bool = True) -> dict[str, Tensor]:
        """One rollout and the optimizer steps on it; metrics [M], means over those steps.

        Without ``measure`` only the cheap ones, all but ``POLICY_METRICS``.
        """
        config = self.config
        self.late_terms.switch(update)
        sampled = self.rollout(update)
        on_policy = self.samplers.on_policy(sampled, update)
        batch = self.batch(sampled, update, measure=measure)
        per_minibatch = config.num_prompts // config.num_minibatches
        firsts = list(range(0, config.num_prompts, per_minibatch)) * config.num_iterations
        derive = partial(self.gradient, measure=measure)
        logged, kl = [], self.terms.kl
        for step, first in enumerate(firsts):
            part = batch.of_prompts(slice(first, first + per_minibatch))
            if measure and step == 0:
                cosines = self._kl_cosine(part, sampled.caches, update)
            given = (part, None if step else sampled.caches)
            output, gradient = self.launch(("gradient", measure), derive, *given, passing=True)
            self.controls.add(output.control_sums)
            clipped = clip_rows(gradient, config.max_grad_norm)
            self._freeze_failed(update, step, output, gradient, clipped.norms)
            self.optimizer.step(clipped.gradient, self.frozen)
            logged.append(torch.stack([*output.metrics.values(), clipped.norms]))
        names, rows = [*output.metrics, "gradient_norm"], elementwise_mean(logged)
        for name, used in (("coefficient", kl.coefficients), ("control", kl.controls)):
            if name in self._cheap:
                names, rows = [*names, name], torch.cat([rows, used.view(1, -1)])
        if self.controllers.active:
            self.controllers.step(batch, self.launch)
        self.controls.step()
        self.references.follow(self.weights, update + 1)
        if measure:
            names, rows = [*names, "kl_cosine"], torch.cat([rows, cosines.unsqueeze(0)])
        whole = self._rollout_metrics("sampled", sampled)
        own = whole if on_policy is sampled else self._rollout_metrics("own", on_policy)
        whole = whole | {f"own_{name}": own[name] for name in ("accuracy", "length")}
        return self._of_alive(names, rows) | self._of_alive(whole, torch.stack([*whole.values()]))

    def _rollout_metrics(self, name: str, sampled: SampledBatch) -> dict[str, Tensor]:
        """Metrics [M] that hold until the next call under the name."""
        given = (sampled.rollout.mask, sampled.scores, sampled.done)
        return self.launch(("metrics", name), rollout_metrics, *given)

    def _of_alive(self, names: Iterable[str], rows: Tensor) -> dict[str, Tensor]:
        """Rows [K, M] by name, NaN where a run is frozen: one launch for all of them."""
        alive = torch.where(self.alive, rows, torch.nan)
        return dict(zip(names, alive.unbind(), strict=True))

    def losses(
        self,
        batch: Batch,
        *,
        measure: bool = False,
        caches: Caches | None = None,
        weights: Tensor | None = None,
    ) -> StepOutput:
        """Losses at the current weights, differentiable with respect to them.

        Args:
            caches: activations of the whole batch under these weights, if they were kept.
            weights: the tensor with respect to which, by default ``self.weights``.
        """
        weights = self.weights if weights is None else weights
        logits = self._logits(weights, batch, caches)
        return compute_step(logits, self.terms, batch, measure=measure)

    def gradient(
        self, batch: Batch, caches: Caches | None = None, *, measure: bool = False
    ) -> tuple[StepOutput, Tensor]:
        """The losses at the current weights, and their gradient [M, N]."""
        weights = self._leaf()
        output = self.losses(batch, measure=measure, caches=caches, weights=weights)
        (gradient,) = torch.autograd.grad(output.losses.sum(), weights)
        return output._replace(losses=output.losses.detach()), gradient

    def _leaf(self) -> Tensor:
        """The weights, as a tensor whose gradient no computation but one asks for."""
        return self.weights.detach().requires_grad_()

    def _logits(self, weights: Tensor, batch: Batch, caches: Caches | None) -> Tensor:
        """[M, P, G, T, V], at the sampling temperature, as a function of the weights.

        Runs that sampled with these very weights have left their activations in ``caches``.
        """
        groups = self.samplers.groups
        caches = [None] * len(groups) if caches is None else caches
        parts = []
        for (_, rows, _), cache in zip(groups, caches, strict=True):
            views = self.policy.unflatten(weights[rows])
            if cache is None:
                inputs = (batch.rollout.prompts[rows], batch.rollout.inputs[rows])
                parts.append(self.policy.logits(views, *inputs))
            else:
                parts.append(self.policy.replay(views, cache))
        return at_temperature(groups.join(parts), self.config.temperature)

    def _kl_cosine(self, batch: Batch, caches: Caches, update: int) -> Tensor:
        """[M]: the metric ``kl_cosine``; NaN where the configuration asks for none.

        Before the first update the policy is the reference: both gradients are rounding errors.
        """
        every = self.config.cosine_every
        if not every or update == 0 or update % every:
            return self.weights.new_full((len(self.runs),), torch.nan)
        return self.launch("cosine", self._measured_cosine, batch, caches, passing=True).clone()

    def _measured_cosine(self, batch: Batch, caches: Caches) -> Tensor:
        weights = self._leaf()
        objectives = kl_objectives(self.terms, batch, self._logits(weights, batch, caches))
        return kl_cosine(objectives, weights)

    def run(self, *, progress: bool = False) -> RunRecord:
        """The updates of the configuration that are not yet done."""
        remaining = range(self.done, self.config.updates)
        for _ in tqdm(remaining, disable=not progress, unit="update"):
            self.advance()
        return self.record()

    def advance(self) -> None:
        """The next update, logged."""
        started = time.perf_counter()
        measure = self.done % self.config.log_every == 0
        with trusted():
            self.logged.append(self.update(self.done, measure=measure))
        self.wall_seconds += time.perf_counter() - started

    def record(self) -> RunRecord:
        """What the updates so far logged."""
        every = self.config.log_every
        windows = [self.logged[first : first + every] for first in range(0, self.done, every)]
        cheap = self._cheap
        means = {n: [elementwise_mean([u[n] for u in w]) for w in windows] for n in cheap}
        firsts = {n: [w[0][n] for w in windows] for n in POLICY_METRICS}
        return RunRecord(
            config=self.config,
            runs=self.runs,
            updates=np.arange(0, self.done, every),
            metrics={n: torch.stack(v).cpu().numpy() for n, v in (means | firsts).items()},
            failures=tuple(self.failures),
            wall_seconds=self.wall_seconds,
            final={name: values.cpu().numpy() for name, values in self._final().items()},
        )

    def _final(self) -> dict[str, Tensor]:
        """:data:`FINAL_METRICS` [M], once the last update is done; NaN where a run is frozen."""
        if not self.config.final_answers or self.done < self.config.updates:
            return {}
        of_run = (
            self.samplers.seeds,
            self.samplers.environment,
            self.weights,
            self.references.first,
            self.samplers.score,
        )
        measured = final_metrics(self.config, *of_run)
        return self._of_alive(measured, torch.stack([*measured.values()]))

    def state(self) -> TrainerState:
        """What :meth:`restore` needs to go on from here, copied to the CPU."""
        tensors = {"weights": self.weights.detach(), "alive": self.alive}
        tensors |= {f"optimizer.{name}": t for name, t in self.optimizer.state().items()}
        tensors |= self.samplers.state()
        for part in self._moving:
            tensors |= part.state()
        for name in self.logs:
            logged = [metrics[name] for metrics in self.logged if name in metrics]
            tensors[f"logged.{name}"] = torch.stack(logged)
        copies = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        return TrainerState(self.done, copies, tuple(self.failures), self.wall_seconds)

    def restore(self, state: TrainerState) -> None:
        """Go on from a state of the same configuration and runs, to the same bits.

        Raises:
            ValueError: a tensor is missing; nothing is changed then.
        """
        names = ("weights", "alive", *(f"optimizer.{name}" for name in PopulationAdamW.STATE))
        names = (*names, *self.samplers.needed(state.update))
        names = (*names, *(name for part in self._moving for name in part.state()))
        for name in (*names, *(f"logged.{name}" for name in self.logs)):
            if name not in state.tensors:
                raise ValueError(f"the state lacks the tensor {name!r}: it cannot go on")
        tensors = {name: tensor.to(self.device) for name, tensor in state.tensors.items()}
        with torch.no_grad():
            self.weights.copy_(tensors["weights"])
        alive = state.tensors["alive"].tolist()
        self._freeze([row for row, is_alive in enumerate(alive) if not is_alive])
        self.optimizer.restore({n: tensors[f"optimizer.{n}"] for n in PopulationAdamW.STATE})
        self.samplers.restore(tensors)
        for part in self._moving:
            part.restore(tensors)
        every = self.config.log_every
        self.logged = [
            {name: tensors[f"logged.{name}"][update] for name in self._cheap}
            for update in range(state.update)
        ]
        for name in POLICY_METRICS:
            for window, value in enumerate(tensors[f"logged.{name}"]):
                self.logged[window * every][name] = value
        self.failures = list(state.failures)
        self.wall_seconds = state.wall_seconds

    def _freeze_failed(
        self, update: int, step: int, output: StepOutput, gradient: Tensor, norms: Tensor
    ) -> None:
        """Mark the runs whose loss or gradient is not finite, before they are stepped."""
        finite = torch.isfinite(norms) & torch.isfinite(output.losses)
        failed = [row for row, bad in enumerate((self.alive & ~finite).tolist()) if bad]
        for run in failed:
            tensors = output.tensors | {
                f"gradient of {name}": part
                for name, part in self.policy.unflatten(gradient).items()
            }
            bad = [k for k, v in tensors.items() if not torch.isfinite(v[run]).all()]
            name = bad[0] if bad else "gradient norm"
            self.failures.append(Failure(run, update, step, name))
        if failed:
            self._freeze([*self.frozen.tolist(), *failed])

    def _freeze(self, rows: list[int]) -> None:
        """These runs, and no others, are left as they are from now on."""
        self.frozen = torch.tensor(sorted(rows), dtype=torch.long).to(self.device)
        self.alive.fill_(True).index_fill_(0, self.frozen, False)
