"""One supervised start for all runs, or one for every seed."""

from __future__ import annotations

import pytest
import torch

from analysis.records.config import SortTask, StartConfig, TeacherConfig, TrainConfig
from analysis.records.variants import Distillation, Sampler, Variant
from analysis.training.tiny.start import supervised_start
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.term import KLTerm
from tests.training.conftest import runs_of
from tests.training.naive import naive_logp

K2 = Variant(kl=KLTerm(estimator="k2"), beta=0.5)


@pytest.fixture
def config(small_config):
    start = StartConfig(updates=10, batch_size=8, count=3, seed=4)
    return small_config.model_copy(update={"start": start, "updates": 3, "log_every": 1})


def test_each_of_several_starts_is_the_one_it_would_be_alone(config):
    several = supervised_start(config)
    assert len(several) == 3
    for place in range(3):
        start = config.start.model_copy(update={"seed": 4 + place, "count": 1})
        alone = supervised_start(config.model_copy(update={"start": start}))
        assert torch.equal(several[place], alone[0])
    assert (several[0] - several[1]).norm() > 0.1


def test_runs_begin_at_the_start_of_their_seed_and_keep_it_as_reference(config):
    seeds = (0, 1, 2, 3, 7)
    trainer = PopulationTrainer(config, runs_of([K2], seeds))
    starts = supervised_start(config)
    assert torch.equal(trainer.weights, starts[[0, 1, 2, 0, 1]])
    trainer.update(0)
    sampled = trainer.rollout(1)
    batch = trainer.batch(sampled)
    for row, start in enumerate((0, 1, 2, 0, 1)):
        views = trainer.policy.unflatten(starts[start : start + 1].double())
        weights = {name: part[0] for name, part in views.items()}
        prompt, tokens = sampled.rollout.prompts[row, 0], sampled.rollout.completions[row, 0, 0]
        expected = naive_logp(weights, prompt.tolist(), tokens.tolist()).float()
        assert torch.allclose(batch.ref_logp[row, 0, 0], expected, rtol=0, atol=1e-4)


def test_with_several_starts_runs_are_their_solo_runs(config):
    runs = runs_of([K2], (5, 0, 1))
    together, alone = PopulationTrainer(config, runs), PopulationTrainer(config, runs[2:])
    together.run()
    alone.run()
    assert torch.equal(together.weights[2], alone.weights[0])


def test_a_teacher_is_one_policy():
    with pytest.raises(ValueError, match="the teacher is one policy"):
        TrainConfig(teacher=TeacherConfig(start=StartConfig(count=2)))


def test_a_teacher_learns_on_its_own_number_of_fillers(small_config):
    roomy = SortTask(num_digits=2, end_token=True, max_fillers=3)
    long = StartConfig(updates=150, batch_size=32, fillers=(3, 3))
    config = small_config.model_copy(
        update={
            "task": roomy,
            "start": StartConfig(updates=150, batch_size=32, fillers=(0, 0)),
            "teacher": TeacherConfig(start=long),
            "group_size": 40,
        }
    )
    taught = Variant(distillation=Distillation())
    by_teacher = taught.model_copy(update={"sampler": Sampler(by="teacher")})
    trainer = PopulationTrainer(config, runs_of([taught, by_teacher]))
    mask = trainer.rollout(0).rollout.mask
    lengths = mask.sum(-1).float().flatten(1).mean(1)
    assert lengths[1] > lengths[0] + 2


@pytest.mark.parametrize("fillers", [(2, 1), (0, 4), (-1, 2)])
def test_fillers_that_do_not_fit_are_refused(fillers):
    task = SortTask(num_digits=2, end_token=True, max_fillers=3)
    with pytest.raises(ValueError, match="must lie in 0"):
        TrainConfig(task=task, start=StartConfig(fillers=fillers))
