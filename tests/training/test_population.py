from __future__ import annotations

import pytest
import torch

from analysis.records.config import SortTask, TrainConfig
from analysis.records.variants import Variant
from analysis.training.optimizer import PopulationAdamW, clip_rows
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.term import KLTerm
from tests.training.conftest import runs_of


def test_default_sizes_are_solo_runs_to_the_bit():
    start = TrainConfig().start.model_copy(update={"updates": 3})
    config = TrainConfig(task=SortTask(reward="graded"), start=start, updates=2)
    runs = runs_of([Variant(kl=KLTerm(estimator="k3"), beta=0.5), Variant()], (0, 1, 2))
    together, alone = PopulationTrainer(config, runs), PopulationTrainer(config, runs[4:5])
    together.run()
    alone.run()
    assert torch.equal(together.weights[4], alone.weights[0])
    assert not torch.equal(together.weights[4], together.weights[1])


def test_a_run_that_goes_nan_is_frozen_named_and_leaves_the_others_unchanged(small_config):
    variants = [
        Variant(kl=KLTerm(estimator=estimator), beta=0.5) for estimator in ("k1", "k2", "k3")
    ]
    healthy = PopulationTrainer(small_config, runs_of(variants))
    poisoned = PopulationTrainer(small_config, runs_of(variants))
    for update in range(4):
        if update == 2:
            with torch.no_grad():
                head = poisoned.policy.unflatten(poisoned.weights)["head"]
                head[1, 0, 0] = torch.nan
            frozen = poisoned.weights[1].clone()
        healthy.update(update)
        metrics = poisoned.update(update)
    assert [tuple(failure) for failure in poisoned.failures] == [(1, 2, 0, "old_logp")]
    assert poisoned.alive.tolist() == [True, False, True]
    assert torch.allclose(poisoned.weights[1], frozen, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(poisoned.weights[[0, 2]], healthy.weights[[0, 2]])
    for name in ("kl_cosine", "teacher_kl"):  # not asked for
        assert metrics.pop(name).isnan().all()
    assert metrics.pop("right_length")[1].isnan()  # others may have no right completion either
    assert all(value[1].isnan() and not value[[0, 2]].isnan().any() for value in metrics.values())


def test_an_overflowing_kl_loss_is_named(small_config):
    trainer = PopulationTrainer(small_config, runs_of([Variant(kl=KLTerm(), beta=0.5)]))
    batch = trainer.batch(trainer.rollout(0))
    output = trainer.losses(batch._replace(ref_logp=batch.ref_logp + 200.0))  # exp overflows
    (gradient,) = torch.autograd.grad(output.losses.sum(), trainer.weights)
    trainer._freeze_failed(0, 0, output, gradient, clip_rows(gradient, 1.0).norms)
    assert trainer.failures[0].tensor == "KL loss"


def test_equal_rewards_give_exactly_no_gradient(small_config):
    trainer = PopulationTrainer(small_config, runs_of([Variant()], (0, 1)))
    sampled = trainer.rollout(0)
    scored = sampled.scores.rewards
    for rewards, still in ((torch.full_like(scored, 0.3), True), (scored, False)):
        batch = trainer.batch(sampled._replace(scores=sampled.scores._replace(rewards=rewards)))
        (gradient,) = torch.autograd.grad(trainer.losses(batch).losses.sum(), trainer.weights)
        assert (batch.advantages == 0).all() == still
        assert (gradient == 0).all() == still


def test_clipping_is_per_run():
    gradient = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    clipped, norms = clip_rows(gradient, max_norm=1.0)
    assert torch.allclose(norms, torch.tensor([5.0, 0.5, 0.0]))
    assert torch.allclose(clipped, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


def test_adamw_is_torch_adamw_per_run_and_leaves_frozen_rows():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    solo = [row.clone().requires_grad_() for row in weights]
    population = weights.clone().requires_grad_()
    ours = PopulationAdamW(population, learning_rate=0.01, weight_decay=0.1)
    theirs = [torch.optim.AdamW([row], lr=0.01, weight_decay=0.1) for row in solo]
    for step in range(5):
        gradient = torch.randn(3, 7, generator=generator, dtype=torch.float64)
        ours.step(gradient.clone(), frozen=torch.tensor([] if step < 2 else [1], dtype=torch.long))
        for index, (row, optimizer) in enumerate(zip(solo, theirs, strict=True)):
            if index != 1 or step < 2:
                row.grad = gradient[index]
                optimizer.step()
    assert torch.allclose(population, torch.stack(solo), rtol=0, atol=1e-14)


def test_no_runs_is_refused(small_config):
    with pytest.raises(ValueError, match="runs is empty"):
        PopulationTrainer(small_config, [])
