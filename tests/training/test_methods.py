"""Every axis of an arm against :mod:`tests.training.naive`, which shares no code with the trainer.

A population of the arms of one axis is moved away from its reference, samples, is moved away from
its samplers, and its losses and gradients are compared with those of naive single runs, to 1e-9.
"""

from __future__ import annotations

import pytest
import torch

from analysis.training.arms import (
    Advantage,
    Arm,
    Correction,
    Distillation,
    Objective,
    Sampler,
    Shaping,
)
from analysis.training.config import Member, StartConfig, TeacherConfig
from analysis.training.policy import PolicyConfig
from analysis.training.randomness import member_uniforms
from analysis.training.setting import Scores
from analysis.training.trainer import PopulationTrainer
from tests.training.naive import Run
from tests.training.naive_loss import naive_loss

UPDATE = 3
K1_REWARD = {"kl_estimator": "k1", "kl_placement": "reward", "beta": 0.3}
NONE = {"kl_estimator": "none"}


def arm(label, **fields):
    return Arm(label=label, **(fields if "kl_estimator" in fields else NONE | fields))


OBJECTIVES = [
    arm(f"{kind}_{low}_{high}", objective=Objective(kind=kind, epsilon_low=low, epsilon_high=high))
    for kind in ("grpo", "gspo", "cispo", "reinforce", "sequence", "grpo_off_policy")
    for low, high in ((0.2, 0.2), (0.1, 0.28))
]
OBJECTIVES += [
    arm(
        f"merged_{reading}",
        objective=Objective(kind="grpo_off_policy", reading=reading),
        kl_credit="immediate",
        **K1_REWARD,
    )
    for reading in ("old", "detached", "attached")
]
OBJECTIVES += [
    arm(f"{kind}_{tau}", objective=Objective(kind=kind, tau=tau))
    for kind in ("mirror_descent", "dpo")
    for tau in (1.0, 0.25)
]
OBJECTIVES += [
    arm("dpo_k2", objective=Objective(kind="dpo"), kl_estimator="k2", beta=0.4),
    arm(
        "mirror_descent_before",
        objective=Objective(kind="mirror_descent"),
        advantage=Advantage(kl_order="before"),
        **K1_REWARD,
    ),
    arm("gspo_marginal", objective=Objective(kind="gspo"), advantage=Advantage(level="marginal")),
]

AGGREGATIONS = [
    arm(
        f"{kind}_{mode}",
        objective=Objective(kind=kind, aggregation=mode),
        kl_estimator="k3",
        beta=0.5,
    )
    for kind in ("grpo", "gspo", "sequence", "mirror_descent")
    for mode in (
        "token_mean",
        "seq_mean_token_mean",
        "seq_mean_token_sum",
        "seq_mean_token_sum_norm",
    )
]

KL = [
    *(
        arm(
            f"{name}_sequence_{weighting}",
            kl_estimator=name,
            kl_level="sequence",
            beta=0.1,
            kl_weighting=weighting,
        )
        for name in ("k1", "k2", "k3", "k3_clip", "k4")
        for weighting in ("none", "attached", "detached")
    ),
    *(
        arm(f"{name}_{weighting}", kl_estimator=name, kl_weighting=weighting, beta=0.5)
        for name in ("k3_clip", "k4")
        for weighting in ("none", "attached", "detached")
    ),
    arm("minimax01", kl_estimator="minimax01", beta=2.0),
    arm("minimax01_detached", kl_estimator="minimax01", kl_weighting="detached", beta=2.0),
    arm("exact", kl_estimator="exact", beta=0.5),
    arm("forward", kl_estimator="forward", beta=0.5),
    arm("k2_shows_k3", kl_estimator="k2", kl_value="k3", beta=0.5),
    arm("k1_shows_k2", kl_estimator="k1", kl_value="k2", kl_weighting="detached", beta=0.5),
    arm("k2_shows_k1_sequence", kl_estimator="k2", kl_value="k1", kl_level="sequence", beta=0.1),
    arm(
        "k3_shows_k2_attached", kl_estimator="k3", kl_value="k2", kl_weighting="attached", beta=0.5
    ),
]

KL_REWARD = [
    arm(
        f"{name}_reward_{credit}_{level}",
        kl_estimator=name,
        kl_placement="reward",
        beta=0.2,
        kl_credit=credit,
        kl_level=level,
    )
    for name in ("k1", "k2", "k3", "k3_clip", "k4")
    for credit, level in (("to_go", "token"), ("immediate", "token"), ("to_go", "sequence"))
]
KL_REWARD += [
    arm(
        f"{name}_before_{baseline}_{level}",
        kl_estimator=name,
        kl_placement="reward",
        beta=0.2,
        kl_level=level,
        advantage=Advantage(kl_order="before", baseline=baseline),
    )
    for name in ("k1", "k3")
    for baseline in ("group_normalise", "group_centre", "leave_one_out")
    for level in ("token", "sequence")
]

ADVANTAGES = [
    arm("ddof0", advantage=Advantage(ddof=0)),
    arm("eps", advantage=Advantage(eps=0.5)),
    arm("eps0", advantage=Advantage(eps=0.0)),
    arm("std_min", advantage=Advantage(std_min=0.35)),
    arm("std_max", advantage=Advantage(std_max=0.2)),
    arm("std_both", advantage=Advantage(std_min=0.25, std_max=0.3, ddof=0)),
    arm("centre", advantage=Advantage(baseline="group_centre")),
    arm("leave_one_out", advantage=Advantage(baseline="leave_one_out")),
    arm("zero_k2", advantage=Advantage(baseline="zero"), kl_estimator="k2", beta=0.5),
    arm("zero_k1_reward", advantage=Advantage(baseline="zero"), **K1_REWARD),
    *(
        arm(f"{level}_{baseline}", advantage=Advantage(level=level, baseline=baseline))
        for level in ("process", "marginal")
        for baseline in ("group_normalise", "group_centre")
    ),
    arm("process_ddof0_eps", advantage=Advantage(level="process", ddof=0, eps=0.3)),
    arm("process_std", advantage=Advantage(level="process", std_min=0.6)),
    arm("marginal_std", advantage=Advantage(level="marginal", std_min=0.3)),
    arm("process_k1_reward", advantage=Advantage(level="process"), **K1_REWARD),
    *(
        arm(
            f"drop_{kind}_{mode}",
            advantage=Advantage(drop_uniform_groups=True),
            kl_estimator="k2",
            beta=0.5,
            objective=Objective(kind=kind, aggregation=mode),
        )
        for kind, mode in (
            ("grpo", "seq_mean_token_mean"),
            ("grpo", "token_mean"),
            ("grpo", "seq_mean_token_sum"),
            ("mirror_descent", "seq_mean_token_mean"),
            ("dpo", "token_mean"),
        )
    ),
]

SHAPINGS = [
    arm("linear", shaping=Shaping(length="linear", weight=0.05)),
    arm("relative", shaping=Shaping(length="relative", weight=0.5)),
    arm("overlong", shaping=Shaping(length="soft_overlong", weight=0.5, buffer=2)),
    arm("noise", shaping=Shaping(noise=0.4)),
    arm(
        "noise_linear_before",
        shaping=Shaping(length="linear", weight=0.05, noise=0.2),
        advantage=Advantage(kl_order="before"),
        **K1_REWARD,
    ),
    arm(
        "relative_dpo",
        shaping=Shaping(length="relative", weight=2.0),
        objective=Objective(kind="dpo"),
    ),
]

SAMPLERS = [
    arm("fresh"),
    arm("stale1", sampler=Sampler(staleness=1)),
    arm(
        "stale2", sampler=Sampler(staleness=2), kl_estimator="k2", kl_weighting="detached", beta=0.5
    ),
    arm("stale_reward", sampler=Sampler(staleness=2), **K1_REWARD),
    arm("hot", sampler=Sampler(temperature=1.3)),
    arm("nucleus", sampler=Sampler(top_p=0.9)),
    arm("stale_nucleus", sampler=Sampler(staleness=1, top_p=0.8, temperature=1.1)),
    arm("teacher", sampler=Sampler(by="teacher")),
    arm("teacher_nucleus", sampler=Sampler(by="teacher", top_p=0.9)),
    arm("repeats", sampler=Sampler(repeat_times=2)),
    arm("repeats_period", sampler=Sampler(repeat_times=2, repeat_period=2), **K1_REWARD),
    arm(
        "repeats_masked",
        sampler=Sampler(repeat_times=2),
        correction=Correction(mask_truncated=True),
    ),
]

HOT = Sampler(temperature=1.4, top_p=0.95)
CORRECTIONS = [
    *(
        arm(
            f"{kind}_{level}",
            sampler=HOT,
            correction=Correction(mismatch=kind, mismatch_level=level, bound=1.25),
        )
        for kind in ("truncated", "masked")
        for level in ("token", "sequence")
    ),
    arm(
        "truncated_stale_cispo",
        sampler=Sampler(temperature=0.7, staleness=1),
        objective=Objective(kind="cispo"),
        kl_estimator="k3",
        beta=0.5,
        correction=Correction(mismatch="truncated", bound=1.1),
    ),
    arm("sequence_mask", correction=Correction(sequence_mask_delta=0.05)),
    arm(
        "sequence_mask_stale",
        sampler=Sampler(staleness=2),
        correction=Correction(sequence_mask_delta=0.1),
        **K1_REWARD,
    ),
    arm("mask_truncated", correction=Correction(mask_truncated=True)),
    arm(
        "mask_truncated_k2", correction=Correction(mask_truncated=True), kl_estimator="k2", beta=0.5
    ),
    *(
        arm(
            f"keep_{kind}",
            sampler=Sampler(top_p=0.8),
            objective=Objective(kind=kind),
            correction=Correction(keep_sampling_mask=True),
        )
        for kind in ("grpo", "gspo", "cispo", "reinforce", "sequence", "mirror_descent")
    ),
    arm(
        "keep_stale",
        sampler=Sampler(top_p=0.8, staleness=2),
        kl_estimator="k2",
        beta=0.5,
        correction=Correction(keep_sampling_mask=True),
    ),
    arm(
        "all_masks",
        sampler=Sampler(top_p=0.9, temperature=1.2),
        correction=Correction(
            mask_truncated=True, sequence_mask_delta=0.02, mismatch="masked", bound=1.5
        ),
    ),
]

ZERO = Advantage(baseline="zero")
DISTILLATIONS = [
    *(
        arm(f"k1_reward_{credit}", advantage=ZERO, distillation=Distillation(credit=credit))
        for credit in ("immediate", "to_go")
    ),
    *(
        arm(
            f"{name}_{weighting}",
            distillation=Distillation(
                estimator=name, placement="loss", weighting=weighting, weight=0.5
            ),
        )
        for name in ("k1", "k2", "k3", "k3_clip")
        for weighting in ("none", "attached", "detached")
    ),
    *(
        arm(name, advantage=ZERO, distillation=Distillation(estimator=name, placement="loss"))
        for name in ("exact", "forward", "cross_entropy", "minimax01")
    ),
    arm(
        "supervised",
        advantage=ZERO,
        sampler=Sampler(by="teacher"),
        distillation=Distillation(estimator="cross_entropy", placement="loss"),
    ),
    arm("annealed", distillation=Distillation(weight=2.0, weight_end=0.5, anneal_updates=10)),
    arm("anneal_done", distillation=Distillation(weight=2.0, weight_end=0.5, anneal_updates=2)),
    arm("only_below", distillation=Distillation(only_below=0.5)),
    arm(
        "only_below_loss",
        kl_estimator="k3",
        beta=0.5,
        distillation=Distillation(
            estimator="k2",
            placement="loss",
            only_below=0.5,
            weight=3.0,
            weight_end=0.0,
            anneal_updates=7,
        ),
    ),
    arm(
        "kdrl",
        distillation=Distillation(estimator="k2", placement="loss", weight=0.3),
        kl_estimator="k1",
        kl_placement="reward",
        beta=0.2,
    ),
]

AXES = {
    "objective": OBJECTIVES,
    "aggregation": AGGREGATIONS,
    "kl": KL,
    "kl_reward": KL_REWARD,
    "advantage": ADVANTAGES,
    "shaping": SHAPINGS,
    "sampler": SAMPLERS,
    "correction": CORRECTIONS,
    "distillation": DISTILLATIONS,
}


class Population:
    """The arms of one axis, away from their reference and away from their samplers."""

    def __init__(self, small_config, arms, *, seed=3, update=UPDATE, same=True):
        self.config = small_config.model_copy(
            update={
                "precision": "float64",
                "temperature": 0.8,
                "num_prompts": 2,
                "group_size": 3,
                "teacher": TeacherConfig(
                    start=StartConfig(updates=30, batch_size=16),
                    policy=PolicyConfig(width=9, num_layers=1, num_heads=3),
                ),
            }
        )
        self.arms, self.update = arms, update
        self.trainer = PopulationTrainer(self.config, [Member(arm=a, seed=seed) for a in arms])
        generator = torch.Generator().manual_seed(0)
        self.past = []
        with torch.no_grad():
            for _ in range(3):
                self.past.insert(0, self._move(generator))
                drawn = self.trainer.rollout(update)
            self._move(generator)
        shape = drawn.rollout.old_logp.shape
        rewards = torch.rand(shape[:3], generator=generator, dtype=torch.float64)
        rewards[:, 1] = torch.where(torch.tensor(same), 0.3, rewards[:, 1])  # a group of equals
        right = torch.rand(shape, generator=generator, dtype=torch.float64) < 0.5
        right[:, :, 0] = False
        steps = right.double()
        accuracy = right[..., 0].double()
        self.scores = Scores(rewards, accuracy, steps, drawn.scores.finished)
        self.drawn = drawn._replace(scores=self.scores)
        self.batch = self.trainer.batch(self.drawn, update)
        self.output = self.trainer.losses(self.batch)
        losses = self.output.losses.sum()
        (self.gradient,) = torch.autograd.grad(losses, self.trainer.weights)

    def _move(self, generator):
        shape = self.trainer.weights[:1].shape
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.trainer.weights += 0.1 * noise
        return self.trainer.weights.detach().clone()

    def run(self, row) -> Run:
        """What the naive run of a member needs."""
        one, rollout, trainer = self.arms[row], self.drawn.rollout, self.trainer
        views = trainer.policy.unflatten(trainer.weights.detach())
        teacher = {n: w[0] for n, w in trainer.teacher.of_members(1).items()}
        then = trainer.policy.unflatten(self.past[one.sampler.staleness])
        noise = member_uniforms([3], "noise", self.update, rollout.mask.shape[1:3], torch.float64)
        return Run(
            arm=one,
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

    def expected(self, run, groups=None):
        """Loss and gradient [N] of a naive run."""
        loss = naive_loss(run, groups)
        weights = list(run.weights.values())
        parts = torch.autograd.grad(loss, weights, allow_unused=True) if loss.requires_grad else ()
        parts = [
            torch.zeros_like(w) if g is None else g
            for w, g in zip(weights, parts or [None] * len(weights), strict=True)
        ]
        flat = torch.cat([part.flatten() for part in parts])
        return loss.detach(), torch.nn.functional.pad(flat, (0, self.trainer.policy.padding))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("same", [False, True], ids=["spread", "one-group-of-equals"])
def test_loss_and_gradient_are_those_of_a_naive_run(small_config, axis, same):
    population = Population(small_config, AXES[axis], same=same)
    wrong = []
    for row, one in enumerate(AXES[axis]):
        loss, gradient = population.expected(population.run(row))
        value_error = (population.output.losses[row] - loss).abs().item()
        error = (population.gradient[row] - gradient).abs().max().item()
        if not (value_error < 1e-9 and error < 1e-9):
            wrong.append((one.name, value_error, error))
        assert same or gradient.norm() > 1e-3, one.name
    assert not wrong
