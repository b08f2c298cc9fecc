"""One update's completions of all members, each sampled as its own arm says.

Members are sampled in groups of one sampler. A group that samples from the very weights it is about
to train keeps its activations: they are the forward pass of its first optimizer step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from analysis.objectives.filtering import repeats
from analysis.training.arms import Sampler
from analysis.training.config import Member, RunConfig
from analysis.training.graphs import Launch
from analysis.training.grouping import Group, Groups
from analysis.training.partial import Buffer
from analysis.training.randomness import member_uniforms
from analysis.training.rollout import Drawing, Rollout, sample
from analysis.training.setting import ReplayingPolicy, Scores, Setting

#: Activations of each group of members, or None where they are not the trained policy's.
Pasts = Sequence[Any]


class Drawn(NamedTuple):
    """What sampling gives the update."""

    rollout: Rollout
    scores: Scores
    pasts: Pasts
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
        members: Sequence[Member],
        setting: Setting,
        launch: Launch,
        *,
        keep: bool,
    ) -> None:
        self.config, self.setting, self.launch = config, setting, launch
        self.keep = keep and isinstance(setting.policy, ReplayingPolicy)
        self.seeds = [member.seed for member in members]
        self.groups: Groups[Sampler] = Groups(
            [member.arm.sampler for member in members], setting.start.device
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

    def draw(self, update: int) -> Drawn:
        """Completions of every member at the remembered weights, and the verifier's scores."""
        config, task = self.config, self.setting.task
        device = self.setting.start.device
        shape = (config.num_prompts, task.draws_per_prompt)
        drawn = member_uniforms(self.seeds, "prompts", update, shape, torch.float64)
        prompts = task.prompts(drawn.to(device))
        noise = self._noise(update)
        rollouts, pasts, cuts, dones, trained = [], [], [], [], []
        for place, group in enumerate(self.groups):
            buffer, given = self.buffers.get(place), (prompts[group.rows], noise[group.rows])
            if buffer is not None:
                rollout, done, kept = self._continued(buffer, group, *given, update)
                past = None
            else:
                rollout, past = self._sample(group, *given)
                done, kept = torch.ones_like(rollout.mask[..., 0, 0]), rollout.mask
            rollout, cut = stopped_at_repeats(group.key, rollout)
            rollouts.append(rollout)
            pasts.append(past)
            cuts.append(cut)
            dones.append(done)
            trained.append(kept & rollout.mask)
        rollout = self._join(rollouts)
        scores = task.score(rollout.prompts, rollout.completions)
        if any(group.key.repeat_times for group in self.groups):
            scores = without(scores, self.groups.join(cuts))
        join = self.groups.join
        return Drawn(rollout, scores, tuple(pasts), join(dones), join(trained))

    def own(self, drawn: Drawn, update: int) -> Drawn:
        """What the policy itself makes of this update's prompts, at the remembered weights.

        Members that sampled so keep their completions; a foreign sampler's are drawn again, with
        the same noise.
        """
        if not any(group.key.foreign for group in self.groups):
            return drawn
        noise, task = self._noise(update), self.setting.task
        masks, accuracies = [], []
        for group in self.groups:
            rows = group.rows
            mask, accuracy = drawn.rollout.mask[rows], drawn.scores.accuracy[rows]
            if group.key.foreign:
                prompts = drawn.rollout.prompts[rows]
                rollout, _ = self._sample(group, prompts, noise[rows], sampler=Sampler())
                mask = rollout.mask
                accuracy = task.score(prompts, rollout.completions).accuracy
            masks.append(mask)
            accuracies.append(accuracy)
        accuracy = self.groups.join(accuracies)
        return drawn._replace(
            rollout=drawn.rollout._replace(mask=self.groups.join(masks)),
            scores=drawn.scores._replace(accuracy=accuracy),
        )

    def _noise(self, update: int) -> Tensor:
        """[M, P, G, T]: the uniforms with which the completions of an update are sampled."""
        config = self.config
        shape = (config.num_prompts, config.group_size, self.setting.task.completion_length)
        noise = member_uniforms(self.seeds, "sampling", update, shape, config.dtype)
        return noise.to(self.setting.start.device)

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
        keep = own and self.keep and sampler.on_policy
        policy = self.setting.policy
        weights = self.history[min(sampler.staleness, len(self.history) - 1)][group.rows]
        drawing = Drawing(sampler.temperature, sampler.top_p)

        def drawn(
            weights: Tensor, prompts: Tensor, noise: Tensor, forced: Tensor | None
        ) -> tuple[Rollout, Any]:
            past = policy.empty_cache(noise, keep=True) if keep else None
            views = policy.unflatten(weights)
            by = policy
            if sampler.by == "teacher":
                by, views = self.setting.teacher.policy, self.setting.teacher.of_members(group.size)
            temperature = self.config.temperature
            task, options = self.setting.task, {"drawing": drawing, "forced": forced}
            return sample(by, views, task, prompts, noise, temperature, past, **options), past

        return self.launch(("sample", group.key, own), drawn, weights, prompts, noise, forced)

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
    steps = None if scores.steps is None else torch.where(cut.unsqueeze(-1), 0.0, scores.steps)
    finished = ~cut if scores.finished is None else scores.finished & ~cut
    return Scores(rewards, accuracy, steps, finished)
