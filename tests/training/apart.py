"""A population away from its reference and from its samplers, beside the naive runs of it."""

from __future__ import annotations

import torch

from analysis.records.config import Run
from analysis.training.environment import Scores
from analysis.training.population import run_uniforms
from analysis.training.trainer import PopulationTrainer
from tests.training.conftest import TEACHER
from tests.training.naive import NaiveRun
from tests.training.naive_loss import naive_loss

UPDATE = 3
SEED = 29  # of completions that are short, long, looping and cut, in one group


class Population:
    """The variants of one axis, away from their reference and, if ``stale``, their samplers."""

    def __init__(self, small_config, variants, *, seed=SEED, update=UPDATE, same=False, stale=True):
        self.config = small_config.model_copy(
            update={
                "precision": "float64",
                "temperature": 0.8,
                "num_prompts": 2,
                "group_size": 3,
                "teacher": TEACHER,
            }
        )
        self.variants, self.seed, self.update = variants, seed, update
        self.trainer = PopulationTrainer(self.config, [Run(variant=a, seed=seed) for a in variants])
        generator = torch.Generator().manual_seed(0)
        self.cache = []
        with torch.no_grad():
            for _ in range(3):
                self.cache.insert(0, self._move(generator))
                sampled = self.trainer.rollout(update)
            if stale:
                self._move(generator)
        shape = sampled.rollout.old_logp.shape
        rewards = torch.rand(shape[1:3], generator=generator, dtype=torch.float64)
        if same:
            rewards[1] = 0.3
        steps = (torch.rand(shape[1:], generator=generator, dtype=torch.float64) < 0.5).double()
        accuracy = steps[..., 0]
        of_all = [part.expand(shape[0], *part.shape) for part in (rewards, accuracy, steps)]
        self.scores = Scores(*of_all, sampled.scores.finished)
        self.sampled = sampled._replace(scores=self.scores)
        self.batch = self.trainer.batch(self.sampled, update)
        self.output = self.trainer.losses(self.batch)
        losses = self.output.losses.sum()
        (self.gradient,) = torch.autograd.grad(losses, self.trainer.weights)

    def _move(self, generator):
        shape = self.trainer.weights[:1].shape
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.trainer.weights += 0.1 * noise
        return self.trainer.weights.detach().clone()

    def run(self, row) -> NaiveRun:
        """What the naive run of a run needs."""
        one, rollout, trainer = self.variants[row], self.sampled.rollout, self.trainer
        views = trainer.policy.unflatten(trainer.weights.detach())
        teacher = {n: w[0] for n, w in trainer.teacher.of_runs(1).items()}
        then = trainer.policy.unflatten(self.cache[one.sampler.staleness])
        noise = run_uniforms(
            [self.seed], "noise", self.update, rollout.mask.shape[1:3], torch.float64
        )
        return NaiveRun(
            variant=one,
            temperature=self.config.temperature,
            weights={name: part[row].clone().requires_grad_() for name, part in views.items()},
            reference={name: part[row] for name, part in trainer.reference.items()},
            sampled_by=(
                teacher
                if one.sampler.by == "teacher"
                else {name: part[row] for name, part in then.items()}
            ),
            teacher=teacher,
            prompts=rollout.prompts[row],
            completions=rollout.completions[row],
            rewards=self.scores.rewards[row],
            accuracy=self.scores.accuracy[row],
            steps=self.scores.steps[row],
            noise=noise[0],
            update=self.update,
        )

    def expected(self, run):
        """Loss and gradient [N] of a naive run."""
        loss = naive_loss(run)
        weights = list(run.weights.values())
        parts = torch.autograd.grad(loss, weights, allow_unused=True) if loss.requires_grad else ()
        parts = [
            torch.zeros_like(w) if g is None else g
            for w, g in zip(weights, parts or [None] * len(weights), strict=True)
        ]
        flat = torch.cat([part.flatten() for part in parts])
        return loss.detach(), torch.nn.functional.pad(flat, (0, self.trainer.policy.padding))
