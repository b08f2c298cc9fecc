"""Every axis of a variant against :mod:`tests.training.naive`, which shares no code with it.

A population of the variants of one axis is moved away from its reference, samples, is moved away
from its samplers, and its losses and gradients are compared with those of naive single runs, to
1e-9.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from analysis.records.variants import Advantage
from analysis.training.loss import kl_cosine, kl_objectives
from kl_term.kl.term import KLTerm
from tests.training import naive_loss
from tests.training.apart import Population
from tests.training.method_variants import (
    ADVANTAGES,
    AXES,
    CORRECTIONS,
    DISTILLATIONS,
    KL,
    KL_REWARD,
    OBJECTIVES,
    SAMPLERS,
    SHAPINGS,
)
from tests.training.naive import read

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize("update", [0, 2, 7, 30])
def test_distillation_follows_its_schedule(small_config, update):
    variants = [one for one in DISTILLATIONS if one.distillation.weight_end is not None]
    population = Population(small_config, variants, update=update)
    losses = []
    for row in range(len(variants)):
        run = population.run(row)
        loss, gradient = population.expected(run)
        assert (population.output.losses[row] - loss).abs() < 1e-9
        assert (population.gradient[row] - gradient).abs().max() < 1e-9
        later = population.expected(dataclasses.replace(run, update=update + 1))[0]
        losses.append((loss - later).abs().item())
    moving = [update < one.distillation.anneal_updates for one in variants]
    assert [change > 1e-6 for change in losses] == moving


def named(variants, *starts):
    return [one for one in variants if one.name.startswith(starts)]


def changed(one, part, **fields):
    """A variant with other fields in a part, unchecked: a sign no variant may have."""
    return one.model_copy(update={part: getattr(one, part).model_copy(update=fields)})


def measured_cosines(population):
    trainer = population.trainer
    logits = trainer._logits(trainer.weights, population.batch, None)
    return kl_cosine(kl_objectives(trainer.terms, population.batch, logits), trainer.weights)


def token_terms():
    variants = named([*KL, *KL_REWARD], "k1_", "k2_", "k3_")
    variants = [v for v in variants if v.kl.level == v.kl.ratio == "token" and not v.kl.value]
    return [v for v in variants if v.advantage.kl_order == Advantage().kl_order]


@pytest.mark.parametrize(
    ("variants", "same"),
    [(token_terms(), False), (named(ADVANTAGES, "drop_grpo"), True)],
    ids=["all groups", "groups that count"],
)
def test_the_kl_cosine_is_that_of_naive_gradients(small_config, variants, same):
    population = Population(small_config, variants, stale=False, same=same)
    measured = measured_cosines(population)
    for row, one in enumerate(variants):
        run = population.run(row)
        of_none, of_exact, of_variant = (
            population.expected(dataclasses.replace(run, variant=variant))[1]
            for variant in (
                one.model_copy(update={"kl": KLTerm(estimator="none"), "beta": 0.0}),
                one.model_copy(update={"kl": KLTerm(estimator="exact"), "beta": 1.0}),
                one,
            )
        )
        expected = torch.cosine_similarity(of_variant - of_none, of_exact - of_none, dim=0)
        assert torch.isclose(measured[row], expected, rtol=0, atol=1e-9), one.name
    assert same or (measured.min() < 0.5 < measured.max() and measured.std() > 0.1)


FLIPS = {
    "beta": (
        [*KL, *KL_REWARD, *named(OBJECTIVES, "merged")],
        lambda one: one.model_copy(update={"beta": -one.beta}),
    ),
    "distillation": (
        [one for one in DISTILLATIONS if one.distillation.weight_end is None],
        lambda one: changed(one, "distillation", weight=-one.distillation.weight),
    ),
    "shaping": (
        named(SHAPINGS, "linear", "relative", "overlong"),
        lambda one: changed(one, "shaping", weight=-one.shaping.weight),
    ),
    "temperature": (
        named(CORRECTIONS, "truncated", "masked"),
        lambda one: changed(one, "sampler", temperature=1 / one.sampler.temperature),
    ),
    "only_below": (
        [one for one in DISTILLATIONS if one.distillation.only_below is not None],
        lambda one: changed(one, "distillation", only_below=None),
    ),
    "clip": (
        named(OBJECTIVES, "grpo_0.1", "cispo_0.1", "sequence_0.1"),
        lambda one: changed(
            one,
            "objective",
            epsilon_low=one.objective.epsilon_high,
            epsilon_high=one.objective.epsilon_low,
        ),
    ),
    "tau": (
        named(OBJECTIVES, "mirror_descent", "dpo"),
        lambda one: changed(one, "objective", tau=-one.objective.tau),
    ),
    "staleness": (
        named(SAMPLERS, "stale1", "stale2", "stale_r"),
        lambda one: changed(one, "sampler", staleness=0),
    ),
}


@pytest.mark.parametrize("flip", FLIPS)
def test_a_flipped_sign_would_be_noticed(small_config, flip):
    variants, flipped = FLIPS[flip]
    population = Population(small_config, variants)
    for row, one in enumerate(variants):
        run = population.run(row)
        wrong = dataclasses.replace(run, variant=flipped(one))
        if flip == "staleness":
            current = population.cache[0]
            views = population.trainer.policy.unflatten(current)
            wrong = dataclasses.replace(wrong, sampled_by={n: w[row] for n, w in views.items()})
        gradient = population.expected(wrong)[1]
        assert (population.gradient[row] - gradient).norm() > 1e-4, one.name


@pytest.mark.parametrize("wrong", ["inverted", "kept"])
def test_a_mismatch_weight_the_wrong_way_would_be_noticed(small_config, monkeypatch, wrong):
    variants = [one for one in CORRECTIONS if one.correction.mismatch != "none"]
    population = Population(small_config, variants)
    right = naive_loss.factors
    other = {
        "inverted": lambda *of: [1 / f if f else 0.0 for f in right(*of)],
        "kept": lambda *of: [1.0 for _ in right(*of)],
    }
    monkeypatch.setattr(naive_loss, "factors", other[wrong])
    for row, one in enumerate(variants):
        gradient = population.expected(population.run(row))[1]
        assert (population.gradient[row] - gradient).norm() > 1e-3, one.name


def test_every_axis_clips_masks_and_cuts_somewhere(small_config):
    """Else the comparisons above would not see those branches."""
    clipped = Population(small_config, OBJECTIVES).output.metrics["clip_fraction"]
    for one, share in zip(OBJECTIVES, clipped, strict=True):
        exercised = one.name.startswith(("grpo", "cispo", "sequence", "merged", "gspo_tight"))
        assert share > 0.05 or not exercised, one.name
    corrections = Population(small_config, CORRECTIONS)
    used = dict(
        zip(
            [one.name for one in CORRECTIONS],
            corrections.output.metrics["used_fraction"],
            strict=True,
        )
    )
    for name in (
        "masked_token",
        "masked_sequence",
        "sequence_mask",
        "sequence_mask_stale",
        "mask_truncated",
        "all_masks",
    ):
        assert 0.0 < used[name] < 1.0, name
    samplers = Population(small_config, SAMPLERS)
    cut = samplers.sampled.rollout.mask.sum(-1)
    assert (cut[9] < cut[0]).any(), "no completion loops"
    assert not samplers.sampled.rollout.keep[5].all()
    lengths = Population(small_config, SHAPINGS).sampled.rollout.mask.sum(-1)
    assert (lengths[0].amin(-1) < lengths[0].amax(-1)).any(), "all lengths are equal"
    groups = [read(samplers.run(row))[0] for row in (0, 7)]
    assert groups[0][0].tokens != groups[1][0].tokens, "the teacher samples what the policy does"
