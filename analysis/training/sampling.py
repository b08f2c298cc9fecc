"""One update's completions of all runs, each sampled as its own variant says.

Runs are sampled in groups of one sampler. A group that samples from the very weights it is about
to train keeps its activations: they are the forward pass of its first optimizer step.

Partial rollouts: with a budget, completions are cut at so many new tokens and continued at the next
update. A group is trained on when all its completions are finished; until then its prompt and what
has been sampled wait in a :class:`Buffer`. So one completion can hold segments of several policies,
each with its own log-probs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from analysis.records.config import Run, RunConfig
from analysis.records.variants import Sampler
from analysis.training.ensembles import Ensembles
from analysis.training.environment import Environment, ReplayingPolicy, Scores, starts_of
from analysis.training.graphs import Launch
from analysis.training.population import Group, Groups, run_uniforms, uploaded
from analysis.training.precision import dtype_of
from analysis.training.rollout import Rollout, SamplingParams, sample
from kl_term.objectives.filtering import repeats
from kl_term.objectives.guidance import current_segment

#: Activations of each group of runs, or None where they are not the trained policy's.
Caches = Sequence[Any]


class SampledBatch(NamedTuple):
    """What sampling gives the update."""

    rollout: Rollout
    scores: Scores
    caches: Caches
    done: Tensor  #: [M, P] bool, groups that are trained on; others are still being sampled
    trained: Tensor  #: [M, P, G, T] bool, counted tokens that are trained on


class Samplers:
    """Who samples how, and the weights of earlier updates that stale samplers use.

    Args:
        launch: calls what samples a group.
        keep: keep activations, where they serve the first optimizer step.
    """

    def __init__(
        self,
        config: RunConfig,
        runs: Sequence[Run],
        environment: Environment,
        launch: Launch,
        *,
        keep: bool,
    ) -> None:
        self.config, self.environment, self.launch = config, environment, launch
        self.keep = keep and isinstance(environment.policy, ReplayingPolicy)
        self.seeds = [run.seed for run in runs]
        #: [M], the start of each run.
        self.starts = starts_of(self.seeds, environment)
        self.ensembles = Ensembles(config, runs, environment, self.starts)
        self.groups: Groups[Sampler] = Groups(
            [run.variant.sampler for run in runs], environment.start.device
        )
        lag = max(group.key.staleness for group in self.groups)
        #: Weights [M, N] at the start of this update, of the one before, and so on.
        self.history: deque[Tensor] = deque(maxlen=lag + 1)
        #: By the place of their group.
        self.buffers = {
            place: Buffer(group.key) for place, group in enumerate(self.groups) if group.key.budget
        }

    def remember(self, weights: Tensor) -> None:
        """Begin an update at these weights."""
        stale = self.history.maxlen > 1
        self.history.appendleft(weights.detach().clone() if stale else weights.detach())

    def state(self) -> dict[str, Tensor]:
        """What stale samplers and partial rollouts still need, by name."""
        tensors = {}
        if self.history.maxlen > 1:
            tensors |= {f"history.{lag}": weights for lag, weights in enumerate(self.history)}
        for place, buffer in self.buffers.items():
            tensors |= {f"buffer.{place}.{name}": t for name, t in buffer.tensors.items()}
        return tensors

    def needed(self, update: int) -> list[str]:
        """Names of the tensors that a :meth:`state` after so many updates must hold."""
        lags = min(update, self.history.maxlen) if self.history.maxlen > 1 else 0
        buffers = self.buffers if update else {}
        return [f"history.{lag}" for lag in range(lags)] + [
            f"buffer.{place}.{name}" for place in buffers for name in Buffer.STATE
        ]

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a :meth:`state`; other tensors are not read."""
        names = (f"history.{lag}" for lag in range(self.history.maxlen))
        self.history.clear()
        self.history.extend(tensors[name] for name in names if name in tensors)
        for place, buffer in self.buffers.items():
            names = {name: f"buffer.{place}.{name}" for name in Buffer.STATE}
            buffer.restore({n: tensors[key] for n, key in names.items() if key in tensors})

    def sample(self, update: int) -> SampledBatch:
        """Completions of every run at the remembered weights, and the verifier's scores."""
        config, task = self.config, self.environment.task
        device = self.environment.start.device
        shape = (config.num_prompts, task.draws_per_prompt)
        drawn = run_uniforms(self.seeds, "prompts", update, shape, torch.float64)
        prompts = task.prompts(uploaded(drawn, device))
        noise = self._noise(update)
        rollouts, caches, cuts, dones, trained = [], [], [], [], []
        for place, group in enumerate(self.groups):
            buffer, given = self.buffers.get(place), (prompts[group.rows], noise[group.rows])
            if buffer is not None:
                rollout, done, kept = self._continued(buffer, group, *given, update)
                cache = None
            else:
                rollout, cache = self._sample(group, *given)
                done, kept = torch.ones_like(rollout.mask[..., 0, 0]), rollout.mask
            rollout, cut = stopped_at_repeats(group.key, rollout)
            rollouts.append(rollout)
            caches.append(cache)
            cuts.append(cut)
            dones.append(done)
            trained.append(kept & rollout.mask)
        rollout = self._join(rollouts)
        scores = self.score(rollout.prompts, rollout.completions)
        if any(group.key.repeat_times for group in self.groups):
            scores = without(scores, self.groups.join(cuts))
        join = self.groups.join
        return SampledBatch(rollout, scores, tuple(caches), join(dones), join(trained))

    def score(self, prompts: Tensor, completions: Tensor) -> Scores:
        """What the task says of completions [M, P, G, T] of all runs, each by its own members."""
        scores = self.environment.task.score(prompts, completions, self.starts)
        if self.ensembles.bounds is None:
            return scores
        return self.launch("ensembles", self.ensembles.of_runs, scores)

    def on_policy(self, sampled: SampledBatch, update: int) -> SampledBatch:
        """What the policy itself makes of this update's prompts, at the remembered weights.

        Runs that sampled so keep their completions; those of another sampler are drawn again, with
        the same noise.
        """
        if not any(group.key.off_policy for group in self.groups):
            return sampled
        noise, task = self._noise(update), self.environment.task
        masks, accuracies = [], []
        for group in self.groups:
            rows = group.rows
            mask, accuracy = sampled.rollout.mask[rows], sampled.scores.accuracy[rows]
            if group.key.off_policy:
                prompts = sampled.rollout.prompts[rows]
                rollout, _ = self._sample(group, prompts, noise[rows], sampler=Sampler())
                mask = rollout.mask
                scores = task.score(prompts, rollout.completions, self.starts[rows])
                accuracy = scores.accuracy
            masks.append(mask)
            accuracies.append(accuracy)
        accuracy = self.groups.join(accuracies)
        return sampled._replace(
            rollout=sampled.rollout._replace(mask=self.groups.join(masks)),
            scores=sampled.scores._replace(accuracy=accuracy),
        )

    def _noise(self, update: int) -> Tensor:
        """[M, P, G, T]: the uniforms with which the completions of an update are sampled."""
        config = self.config
        shape = (config.num_prompts, config.group_size, self.environment.task.completion_length)
        noise = run_uniforms(self.seeds, "sampling", update, shape, dtype_of(config))
        return uploaded(noise, self.environment.start.device)

    def _continued(
        self, buffer: Buffer, group: Group, prompts: Tensor, noise: Tensor, update: int
    ) -> tuple[Rollout, Tensor, Tensor]:
        """The rollout of a group with a budget: see :meth:`Buffer.advance`."""
        carried, forced = buffer.resume(prompts, noise)
        rollout, _ = self._sample(group, carried, noise, forced)
        return buffer.advance(rollout, update)

    def _sample(
        self,
        group: Group,
        prompts: Tensor,
        noise: Tensor,
        forced: Tensor | None = None,
        *,
        sampler: Sampler | None = None,
    ) -> tuple[Rollout, Any]:
        """The rollout of a group, by its own sampler or another, and the activations it keeps."""
        own, sampler = sampler is None, sampler or group.key
        keep = own and self.keep and sampler.shares_activations
        policy = self.environment.policy
        weights = self.history[min(sampler.staleness, len(self.history) - 1)][group.rows]
        params = SamplingParams(sampler.temperature, sampler.top_p)

        def sampled(
            weights: Tensor, prompts: Tensor, noise: Tensor, forced: Tensor | None
        ) -> tuple[Rollout, Any]:
            cache = policy.empty_cache(noise, keep=True) if keep else None
            views = policy.unflatten(weights)
            by = policy
            if sampler.by == "teacher":
                teacher = self.environment.teacher
                by, views = teacher.policy, teacher.of_runs(group.size)
            temperature = self.config.temperature
            task, options = self.environment.task, {"params": params, "forced": forced}
            return sample(by, views, task, prompts, noise, temperature, cache, **options), cache

        return self.launch(("sample", group.key, own), sampled, weights, prompts, noise, forced)

    def _join(self, rollouts: Sequence[Rollout]) -> Rollout:
        """Rollouts of the groups as one; sampling masks are as wide as the widest of them."""
        width = max(rollout.keep.shape[-1] for rollout in rollouts)
        wide = [r._replace(keep=r.keep.expand(*r.mask.shape, width)) for r in rollouts]
        return Rollout(*(self.groups.join(parts) for parts in zip(*wide, strict=True)))


def stopped_at_repeats(sampler: Sampler, rollout: Rollout) -> tuple[Rollout, Tensor]:
    """The rollout with looping completions cut where the loop shows, and which [m, P, G] were."""
    if not sampler.repeat_times:
        return rollout, torch.zeros_like(rollout.mask[..., 0])
    looping = repeats(rollout.completions, period=sampler.repeat_period, times=sampler.repeat_times)
    looping = (looping & rollout.mask).long()
    before = (looping.cumsum(dim=-1) - looping) == 0
    return rollout._replace(mask=rollout.mask & before), looping.any(dim=-1)


def without(scores: Scores, cut: Tensor) -> Scores:
    """Scores with 0 for the completions that were cut."""
    rewards, accuracy = (torch.where(cut, 0.0, part) for part in scores[:2])
    gold = None if scores.gold is None else torch.where(cut, 0.0, scores.gold)
    steps = None if scores.steps is None else torch.where(cut.unsqueeze(-1), 0.0, scores.steps)
    finished = ~cut if scores.finished is None else scores.finished & ~cut
    changed = {"rewards": rewards, "accuracy": accuracy, "gold": gold}
    if scores.members is not None:
        parts = ("spread", "beyond")
        changed |= {name: torch.where(cut, 0.0, getattr(scores, name)) for name in parts}
        changed["members"] = torch.where(cut.unsqueeze(-1), 0.0, scores.members)
    return scores._replace(steps=steps, finished=finished, **changed)


#: Update of a token that is not sampled yet.
UNSAMPLED = -1


class Buffer:
    """What the runs of one sampler carry from update to update.

    Args:
        sampler: with a budget.
    """

    #: Tensors [m, P, ...] that a run's state holds.
    STATE = ("prompts", "completions", "sampled_at", "old_logp")

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.tensors: dict[str, Tensor] = {}

    def resume(self, prompts: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Prompts to sample on from, this update's where a group begins, and forced tokens.

        Args:
            prompts: [m, P, L], of this update.
            uniforms: [m, P, G, T], of this update; its shape and dtype are used.

        Returns:
            Prompts [m, P, L], and tokens [m, P, G, T], -1 where one is to be drawn.
        """
        if not self.tensors:
            unsampled = torch.full_like(uniforms, UNSAMPLED, dtype=torch.long)
            self.tensors = {
                "prompts": prompts,
                "completions": unsampled,
                "sampled_at": unsampled,
                "old_logp": torch.zeros_like(uniforms),
            }
        sampled = self._sampled()
        begun = sampled.flatten(-2).any(dim=-1, keepdim=True)
        carried = torch.where(begun, self.tensors["prompts"], prompts)
        return carried, torch.where(sampled, self.tensors["completions"], -1)

    def advance(self, rollout: Rollout, update: int) -> tuple[Rollout, Tensor, Tensor]:
        """Take up to the budget of new tokens a completion; let go of the groups that are done.

        Args:
            rollout: sampled from :meth:`resume`, as if there were no budget.
            update: this one.

        Returns:
            The rollout, where nothing of unfinished groups is counted; [m, P] bool, the groups that
            are finished; and [m, P, G, T] bool, the tokens that are to be trained on.
        """
        before = self._sampled()
        position = torch.arange(before.shape[-1], device=before.device)
        first = before.sum(dim=-1, keepdim=True)
        new = (position >= first) & (position < first + self.sampler.budget)
        sampled_at = torch.where(new, update, self.tensors["sampled_at"])
        old_logp = torch.where(before, self.tensors["old_logp"], rollout.old_logp)
        unfinished = rollout.mask & (sampled_at == UNSAMPLED)
        done = ~unfinished.flatten(-2).any(dim=-1)
        mask = rollout.mask & done[..., None, None]
        trained = mask
        if self.sampler.train_on == "current":
            trained = current_segment(mask, sampled_at, update)
        empty = done[..., None, None]
        self.tensors = {
            "prompts": rollout.prompts,
            "completions": rollout.completions,
            "sampled_at": torch.where(empty, UNSAMPLED, sampled_at),
            "old_logp": old_logp,
        }
        rollout = rollout._replace(old_logp=old_logp, sampler_logp=old_logp, mask=mask)
        return rollout, done, trained

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from the tensors of a state; with none, from nothing."""
        self.tensors = dict(tensors)

    def _sampled(self) -> Tensor:
        return self.tensors["sampled_at"] != UNSAMPLED
