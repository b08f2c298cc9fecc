"""Partial rollouts: completions sampled over several updates, segment by segment."""

from __future__ import annotations

import pytest
import torch

from analysis.records.config import SortTask
from analysis.records.variants import Objective, Sampler, Variant
from analysis.training.trainer import PopulationTrainer
from tests.training.conftest import runs_of, what_is_sampled
from tests.training.naive import END, naive_logp

BUDGET = 2


@pytest.fixture
def config(small_config):
    task = SortTask(num_digits=4, end_token=True, reward="graded")
    return small_config.model_copy(
        update={
            "precision": "float64",
            "updates": 9,
            "log_every": 3,
            "task": task,
            "num_prompts": 6,
            "group_size": 2,
        }
    )


def watched(config, variant):
    """Rollouts and the weights that each update began with."""
    trainer, weights = PopulationTrainer(config, runs_of([variant], [1])), []
    sampled = what_is_sampled(trainer)
    for _ in range(config.updates):
        weights.append(trainer.policy.unflatten(trainer.weights.detach().clone()))
        trainer.advance()
    return trainer, sampled, weights


def of_budget(train_on="all", **fields):
    return Variant(sampler=Sampler(budget=BUDGET, train_on=train_on), **fields)


def counted(tokens):
    return tokens.index(END) + 1 if END in tokens else len(tokens)


def test_every_segment_is_of_the_weights_that_sampled_it(config):
    _, sampled, weights = watched(config, of_budget())
    longest, begun, mixed = config.task.completion_length, [0] * config.num_prompts, 0
    for update, (rollout, _, _, done, trained) in enumerate(sampled):
        for p in range(config.num_prompts):
            spent = (update - begun[p] + 1) * BUDGET
            rows = rollout.completions[0, p].tolist()
            lengths = [counted(row[: min(spent, longest)]) for row in rows]
            ended = [END in row[:spent] or spent >= longest for row in rows]
            assert done[0, p] == all(ended), (update, p)
            if not done[0, p]:
                assert not rollout.mask[0, p].any() and not trained[0, p].any()
                continue
            for g, row in enumerate(rows):
                assert rollout.mask[0, p, g].sum() == lengths[g]
                for t in range(lengths[g]):
                    day = begun[p] + t // BUDGET
                    of_day = {name: part[0] for name, part in weights[day].items()}
                    logp = naive_logp(of_day, rollout.prompts[0, p].tolist(), row)[t]
                    assert abs(logp - rollout.old_logp[0, p, g, t]) < 1e-9
                    mixed += day != update
            begun[p] = update + 1
    assert mixed > 50, "no completion spans two updates"


def test_a_group_keeps_its_prompt_until_it_is_done_and_then_takes_the_days(config):
    _, sampled, _ = watched(config, of_budget())
    fresh = [
        PopulationTrainer(config, runs_of([Variant()], [1])).rollout(u).rollout.prompts
        for u in range(config.updates)
    ]
    begun = [0] * config.num_prompts
    for update, one in enumerate(sampled):
        for p in range(config.num_prompts):
            assert torch.equal(one.rollout.prompts[0, p], fresh[begun[p]][0, p]), (update, p)
            if one.done[0, p]:
                begun[p] = update + 1


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_a_step_is_a_mean_over_the_groups_that_are_done(config, aggregation):
    objective = Objective(kind="reinforce", aggregation=aggregation)
    trainer, sampled, _ = watched(config, of_budget(objective=objective))
    some = [one for one in sampled if 0 < one.done.sum() < config.num_prompts]
    assert some, "always all or none are done"
    make_batch = PopulationTrainer.batch
    for one in some:
        batch = make_batch(trainer, one)
        rows = one.done[0].nonzero().flatten()
        alone = batch._indexed(lambda part, rows=rows: part[:, rows].contiguous())
        assert torch.allclose(
            trainer.losses(batch).losses, trainer.losses(alone).losses, rtol=0, atol=1e-12
        )


def test_of_the_last_segment_alone(config):
    _, everything, _ = watched(config, of_budget())
    _, current, _ = watched(config, of_budget("current"))
    first = next(update for update, one in enumerate(everything) if one.done.any())
    left, right = everything[first], current[first]
    assert torch.equal(left.rollout.mask, right.rollout.mask)  # nothing was trained on before
    assert torch.equal(left.trained, left.rollout.mask)
    position = torch.arange(left.rollout.mask.shape[-1])
    assert torch.equal(right.trained, left.rollout.mask & (position >= first * BUDGET))
    assert right.trained.any() and (right.trained != left.trained).any()
