"""Who samples: stale weights, the teacher, other temperatures, and completions that loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from analysis.records.config import SortTask, StartConfig
from analysis.records.variants import Sampler, Shaping, Variant
from analysis.training.rollout import SamplingParams, sample
from analysis.training.tiny.tasks import Sorting
from analysis.training.trainer import PopulationTrainer
from tests.training.conftest import TEACHER, runs_of, what_is_sampled
from tests.training.naive import END, SEPARATOR, first_loop, naive_logits, naive_logp, nucleus


def of(**fields) -> Variant:
    return Variant(sampler=Sampler(**fields))


@pytest.fixture
def config(small_config):
    changed = {"precision": "float64", "temperature": 0.8, "teacher": TEACHER, "num_prompts": 2}
    return small_config.model_copy(update=changed)


def logp_of_run(weights, temperature, rollout, row):
    """[P, G, T]: log-probs of a run's completions, one sequence at a time."""
    prompts, completions = rollout.prompts[row].tolist(), rollout.completions[row].tolist()
    rows = [
        torch.stack([naive_logp(weights, prompt, one, temperature) for one in group])
        for prompt, group in zip(prompts, completions, strict=True)
    ]
    return torch.stack(rows)


def of_row(policy, weights, row):
    return {name: part[row] for name, part in policy.unflatten(weights).items()}


def test_samples_are_of_the_weights_so_many_updates_ago(config):
    lags = (0, 1, 3)
    trainer = PopulationTrainer(config, runs_of([of(staleness=lag) for lag in lags], [2]))
    sampled, before = what_is_sampled(trainer), []
    for update in range(6):
        before.append(trainer.weights.detach().clone())
        trainer.update(update)
    for row, lag in enumerate(lags):
        for update in (0, 1, 2, 5):
            then, rollout = max(update - lag, 0), sampled[update].rollout
            for other in {0, 1, 2, 5, then}:
                weights = of_row(trainer.policy, before[other], row)
                error = logp_of_run(weights, 0.8, rollout, row) - rollout.old_logp[row]
                error = error[rollout.mask[row]].abs().max()
                assert error < 1e-9 if other == then else error > 1e-5, (lag, update, other)


def test_the_first_token_is_as_frequent_as_the_sampler_says(config):
    draws, top_p, temperature = 20000, 0.85, 1.3
    trainer = PopulationTrainer(config, runs_of([of()]))
    weights = trainer.policy.unflatten(3.0 * trainer.weights.detach())
    prompts = torch.tensor([3, 1, 2]).expand(1, draws // 4, 3)
    uniforms = torch.rand(1, draws // 4, 4, 1, generator=torch.Generator().manual_seed(0)).double()
    logits = naive_logits(
        of_row(trainer.policy, 3.0 * trainer.weights.detach(), 0), [3, 1, 2, SEPARATOR]
    )[-1]
    logp = torch.log_softmax(logits / 0.8 / temperature, -1)
    expected = torch.stack(nucleus(logp, top_p))
    assert 1 < expected.isfinite().sum() < 16
    params = SamplingParams(temperature, top_p)
    rollout = sample(
        trainer.policy, weights, Sorting(config.task), prompts, uniforms, 0.8, params=params
    )
    tokens = rollout.completions.flatten()
    shares = tokens.bincount(minlength=16) / draws
    probs = expected.exp()
    assert ((shares - probs).abs() <= 4.5 * (probs * (1 - probs) / draws).sqrt() + 1e-12).all()
    assert (shares - torch.log_softmax(logits / 0.8, -1).exp()).abs().max() > 0.02
    assert torch.allclose(rollout.sampler_logp.flatten(), expected[tokens], rtol=0, atol=1e-9)
    plain = torch.log_softmax(logits / 0.8, -1)
    assert torch.allclose(rollout.old_logp.flatten(), plain[tokens], rtol=0, atol=1e-9)
    assert torch.equal(rollout.keep[0, 0, 0, 0], expected.isfinite())


def test_nothing_is_drawn_outside_the_nucleus_even_at_the_last_uniform(config):
    trainer = PopulationTrainer(config, runs_of([of()]))
    weights = trainer.policy.unflatten(trainer.weights.detach())
    prompts = torch.tensor([[[3, 1, 2]]])
    highest = float(np.nextafter(1.0, 0.0))
    for value in (0.0, highest):
        uniforms = torch.full((1, 1, 2, 4), value, dtype=torch.float64)
        params = SamplingParams(1.0, 0.4)
        rollout = sample(
            trainer.policy, weights, Sorting(config.task), prompts, uniforms, 0.8, params=params
        )
        assert rollout.sampler_logp.isfinite().all()
        assert rollout.keep.gather(-1, rollout.completions.unsqueeze(-1)).all()
        assert (~rollout.keep).any()


def test_samplers_in_one_population_do_not_mix(config):
    variants = [of(), of(staleness=2), of(temperature=1.5), of(by="teacher"), of(top_p=0.7)]
    trainer = PopulationTrainer(config, runs_of(variants, [4]))
    with torch.no_grad():
        for _ in range(3):
            trainer.weights += 0.1 * torch.randn(
                trainer.weights.shape, generator=torch.Generator().manual_seed(1)
            )
            rollout = trainer.rollout(0).rollout
    assert (rollout.prompts == rollout.prompts[0]).all()
    teacher = {name: part[0] for name, part in trainer.teacher.of_runs(1).items()}
    error = logp_of_run(teacher, 0.8, rollout, 3) - rollout.old_logp[3]
    assert error.abs().max() < 1e-9
    assert rollout.keep[:4].all() and not rollout.keep[4].all()
    assert torch.equal(rollout.sampler_logp[[0, 1, 3]], rollout.old_logp[[0, 1, 3]])
    assert (rollout.sampler_logp[[2, 4]] != rollout.old_logp[[2, 4]]).any()


def test_a_loop_ends_the_completion_unpaid(config):
    """Untrained policies loop a lot; what the naive search finds is cut and scores 0."""
    config = config.model_copy(
        update={
            "start": StartConfig(updates=40, batch_size=16),
            "task": SortTask(num_digits=5, end_token=True, reward="graded"),
            "group_size": 60,
        }
    )
    variants = [of(), of(repeat_times=2), of(repeat_times=2, repeat_period=2)]
    sampled = PopulationTrainer(config, runs_of(variants, [1])).rollout(0)
    rollout, scores = sampled.rollout, sampled.scores
    cuts = [0, 0, 0]
    for row, (times, period) in enumerate(((0, 1), (2, 1), (2, 2))):
        for p in range(2):
            for g, tokens in enumerate(rollout.completions[row, p].tolist()):
                length = tokens.index(END) + 1 if END in tokens else len(tokens)
                loop = first_loop(tokens[:length], period, times)
                cuts[row] += loop is not None
                counted = length if loop is None else loop + 1
                assert rollout.mask[row, p, g].tolist() == [t < counted for t in range(len(tokens))]
                assert loop is None or scores.rewards[row, p, g] == scores.accuracy[row, p, g] == 0
                assert loop is None or not scores.steps[row, p, g].any()
                assert scores.finished[row, p, g] == (END in tokens and loop is None)
    assert cuts[0] == 0 and 5 < cuts[1] <= cuts[2] < 120
    assert (scores.rewards[0] > 0).any() and (scores.rewards[0] != scores.rewards[1]).any()


def test_runs_of_one_seed_see_one_noise_and_no_width_is_none(config):
    def noisy(width, label):
        return Variant(label=label, shaping=Shaping(noise=width))

    noises = [noisy(0.0, "a"), noisy(0.4, "b"), noisy(0.8, "c")]
    runs = runs_of(noises, [1]) + runs_of([noisy(0.8, "d")], [2])
    trainer = PopulationTrainer(config, runs)
    sampled = trainer.rollout(0)
    added = trainer.batch(sampled, 0).rewards - sampled.scores.rewards
    assert (added[0] == 0).all()
    assert torch.allclose(2 * added[1], added[2], rtol=0, atol=1e-6)
    assert (added[2] >= 0).all() and (added[2] < 0.8).all() and added[2].std() > 0.1
    assert (added[3] - added[2]).abs().max() > 0.05
    later = trainer.batch(sampled, 1).rewards - sampled.scores.rewards
    assert (later[2] - added[2]).abs().max() > 0.05


def test_an_variant_that_needs_a_teacher_is_refused_without_one(small_config):
    cloning = runs_of([of(by="teacher")])
    said = r"^variant 'none' needs a teacher: set teacher in the config"
    with pytest.raises(ValueError, match=said):
        PopulationTrainer(small_config, cloning)
