"""Variants of every axis together: each run of a mixed population is its solo run, to the bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from analysis.records.config import Run
from analysis.records.metrics import METRICS, PARTIAL_METRICS
from analysis.records.variants import Sampler, Variant
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.term import KLTerm
from tests.training.conftest import TEACHER, runs_of
from tests.training.method_variants import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    DISTILLATIONS,
    KL,
    KL_REWARD,
    OBJECTIVES,
    SAMPLERS,
    SHAPINGS,
)

pytestmark = pytest.mark.slow

BUDGETS = [
    Variant(label="budget", sampler=Sampler(budget=2)),
    Variant(label="budget_current", sampler=Sampler(budget=3, train_on="current")),
]
PLAIN = [Variant()]
KINDS = {one.objective.kind: [] for one in [*OBJECTIVES, *AGGREGATIONS]}
for one in [*OBJECTIVES, *AGGREGATIONS]:
    KINDS[one.objective.kind].append(one)
#: Where each part of a variant is taken from, list by list; a composition is one choice of each.
PARTS = {
    "kl": [PLAIN, KL, KL_REWARD],
    "objective": list(KINDS.values()),
    "advantage": [PLAIN, ADVANTAGES, KL_REWARD],
    "shaping": [PLAIN, SHAPINGS],
    "sampler": [SAMPLERS, CORRECTIONS, BUDGETS],
    "correction": [PLAIN, *[CORRECTIONS] * 6],
    "distillation": [PLAIN, DISTILLATIONS],
}


def compositions(count: int, seed: int) -> list[Variant]:
    """So many random variants that are valid; what a part cannot go with is drawn again."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        of = {part: draw.choice(draw.choice(lists)) for part, lists in PARTS.items()}
        fields = {part: getattr(one, part) for part, one in of.items()} | {"beta": of["kl"].beta}
        try:
            found.append(Variant(label=f"composition {len(found)}", **fields))
        except ValidationError:
            continue
    return found


@pytest.fixture
def config(small_config):
    changed = {"teacher": TEACHER, "updates": 4, "log_every": 2, "cosine_every": 2}
    return small_config.model_copy(update=changed)


def runs(variants):
    return [Run(variant=variant, seed=5 + place % 2) for place, variant in enumerate(variants)]


def teaches(variant: Variant) -> bool:
    """Does a variant always have a gradient at its reference, where that of a KL is 0?"""
    return variant.advantage.baseline not in ("zero", "shortest_right") or bool(
        variant.distillation
    )


def of_run(record, row):
    return {name: values[:, row] for name, values in record.metrics.items()}


@pytest.mark.parametrize("inner", [(1, 1), (2, 3)], ids=["one-step", "stale-minibatches"])
def test_forty_random_compositions_train_and_are_their_solo_runs(config, inner):
    config = config.model_copy(update={"num_iterations": inner[0], "num_minibatches": inner[1]})
    everyone = runs(compositions(40, seed=7))
    assert {run.variant.objective.kind for run in everyone} == set(KINDS)
    together = PopulationTrainer(config, everyone)
    record = together.run()
    assert not record.failures
    assert together.weights.isfinite().all()
    start = PopulationTrainer(config, everyone).weights
    learns = [row for row, run in enumerate(everyone) if teaches(run.variant)]
    assert ((together.weights - start).norm(dim=1)[learns] > 1e-3).all()
    whole = [row for row, run in enumerate(everyone) if not run.variant.sampler.budget]
    for name in METRICS:  # a budget may leave a window without a finished group
        if name not in PARTIAL_METRICS:
            assert np.isfinite(record.metrics[name][:, whole]).all(), name
    for row in range(inner[1] - 1, len(everyone), 3 if inner[1] == 1 else 8):
        alone = PopulationTrainer(config, [everyone[row]])
        solo = alone.run()
        assert torch.equal(together.weights[row], alone.weights[0]), everyone[row].variant
        np.testing.assert_equal(of_run(record, row), of_run(solo, 0))


def test_a_run_goes_on_from_any_update_to_the_same_bits(config):
    variants = [
        variant
        for variant in compositions(40, seed=1)
        if variant.sampler.staleness or variant.sampler.budget
    ]
    assert {variant.sampler.staleness for variant in variants} == {0, 1, 2}
    variants = [*variants, Variant()]
    straight = PopulationTrainer(config, runs(variants))
    for _ in range(config.updates):
        straight.advance()
    for done in (1, 2, 3):
        first, second = (PopulationTrainer(config, runs(variants)) for _ in range(2))
        for _ in range(done):
            first.advance()
        state = first.state()
        first.advance()  # what the first does afterwards must not reach the state
        second.restore(state)
        for _ in range(done, config.updates):
            second.advance()
        assert torch.equal(straight.weights, second.weights), done
        np.testing.assert_equal(straight.record().metrics, second.record().metrics)


@pytest.mark.parametrize("lost", ["history.1", "buffer"])
def test_a_state_without_what_a_sampler_needs_is_refused(config, lost):
    variants = [
        Variant(label="a", sampler=Sampler(staleness=2)),
        Variant(label="b", sampler=Sampler(budget=2)),
    ]
    trainer = PopulationTrainer(config, runs(variants))
    trainer.advance()
    trainer.advance()
    state = trainer.state()
    names = [name for name in state.tensors if name.startswith(lost)]
    assert names
    tensors = {name: part for name, part in state.tensors.items() if name != names[0]}
    with pytest.raises(ValueError, match="the state lacks the tensor"):
        PopulationTrainer(config, runs(variants)).restore(state._replace(tensors=tensors))


def test_a_budget_that_fits_every_completion_changes_nothing(config):
    plain = Variant(kl=KLTerm(estimator="k2"), beta=0.3)
    longest = config.task.completion_length
    budgets = [
        plain.model_copy(update={"sampler": Sampler(budget=longest, train_on=which)})
        for which in ("all", "current")
    ]
    config = config.model_copy(update={"num_minibatches": 3})  # no variant replays its sampling
    trainer = PopulationTrainer(config, runs_of([plain, *budgets], [1]))
    record = trainer.run()
    for row in (1, 2):
        assert torch.equal(trainer.weights[0], trainer.weights[row])
        np.testing.assert_equal(of_run(record, 0), of_run(record, row))
