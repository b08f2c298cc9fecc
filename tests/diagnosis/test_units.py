"""What counts as one observation, and intervals over such units."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from benchmarks.diagnosis.chains import Population, sample, truth
from benchmarks.diagnosis.healthy import as_rollouts
from kl_term.diagnosis.columns import assemble
from kl_term.diagnosis.divergence import kl_estimates, surprise_gap
from kl_term.diagnosis.schema import Interval, Settings
from kl_term.diagnosis.statistics import student, token_means

FAST = Settings(resamples=200)


def rows(**columns):
    """Three tokens a sequence."""
    count = len(columns["old_logp"])
    frame = {name: np.repeat(values, 3) for name, values in columns.items()}
    frame["sequence"] = np.repeat(np.arange(count), 3)
    frame["old_logp"] = frame["old_logp"] - 0.1 * np.tile(np.arange(3), count)
    return assemble(pd.DataFrame(frame | {"logp": frame["old_logp"], "ref_logp": -1.0}), "here")


def test_a_completion_of_several_steps_is_one():
    old = -np.array([1.0, 2.0, 3.0, 1.0, 2.0, 3.0])
    units = rows(old_logp=old, step=np.repeat([0, 1], 3)).units
    assert units.completion.tolist() == units.completion.tolist()[:3] * 2
    assert len(set(units.completion)) == 3
    assert units.fresh.tolist() == [True] * 3 + [False] * 3
    assert (units.prompt == units.completion).all(), "no groups are known"


def test_equal_completions_of_one_step_stay_apart():
    units = rows(old_logp=-np.ones(6), step=np.repeat([4, 5], 3)).units
    assert units.completion.tolist() == [0, 1, 2, 0, 1, 2]
    one = rows(old_logp=-np.ones(6)).units
    assert len(set(one.completion)) == 6 and one.fresh.all()


def test_tokens_tell_apart_what_log_probs_do_not():
    old, token = -np.ones(4), np.array([1, 2, 1, 2])
    units = rows(old_logp=old, token=token, step=np.array([0, 0, 1, 1])).units
    assert units.completion.tolist() == [0, 1, 0, 1]


def test_groups_are_prompts_and_numbers_that_begin_again_are_not():
    old = -np.arange(1.0, 9.0)
    step, group = np.repeat([0, 1], 4), np.array([0, 0, 1, 1, 2, 2, 3, 3])
    assert rows(old_logp=old, step=step, group=group).units.prompt.tolist() == group.tolist()
    again = rows(old_logp=old, step=step, group=group % 2).units.prompt
    assert len(set(again)) == 4
    trained_twice = np.concatenate([old[:4], old[:4]])
    units = rows(old_logp=trained_twice, step=step, group=group % 2).units
    assert len(set(units.prompt)) == 2 and len(set(units.completion)) == 4


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 20, 500])
def test_quantiles_are_students(freedom):
    exact = stats.t.ppf(0.975, freedom)
    assert student(freedom) == pytest.approx(exact, rel=1e-12 if freedom < 3 else 3e-3)


def test_repeats_narrow_no_interval():
    """Eight updates on one rollout of a policy that does not move: the interval of one update."""
    once = as_rollouts(sample(Population(move=0.0), 3, prompts=16, group=4))
    often = as_rollouts(sample(Population(move=0.0), 3, prompts=16, group=4, updates=8))
    (one, *_), (many, *_) = (kl_estimates(dump, FAST) for dump in (once, often))
    assert (one.estimator, many.estimator) == ("k1", "k1")
    for end in ("value", "low", "high"):
        assert getattr(many.interval, end) == pytest.approx(getattr(one.interval, end), rel=1e-9)
    by_row = token_means({"k1": often.logp - often.ref_logp}, often.sequence, resamples=200, seed=0)
    width = many.interval.high - many.interval.low
    assert by_row["k1"].high - by_row["k1"].low < 0.6 * width, "what stood"


@pytest.mark.slow
def test_intervals_cover_the_truth():
    """Of sixteen prompts and eight updates: 92% or more where rows gave half of that."""
    population = Population()
    exact, covered, by_row = truth(population, 8, completions=40_000)["k1"], 0, 0
    for seed in range(60):
        dump = as_rollouts(sample(population, seed, prompts=16, group=4, updates=8))
        interval = kl_estimates(dump, FAST)[0].interval
        covered += interval.low <= exact <= interval.high
        values = {"k1": dump.logp - dump.ref_logp}
        naive = token_means(values, dump.sequence, resamples=100, seed=0)["k1"]
        by_row += naive.low <= exact <= naive.high
    assert covered >= 53 and by_row < 45


def test_surprise_is_that_of_completions_before_they_were_trained_on():
    drawn = sample(Population(), 0, prompts=8, group=4, updates=4)
    dump = as_rollouts(drawn)
    gap = surprise_gap(dump, FAST)["surprise_gap"]
    first = -np.nansum(drawn.logp[0] + drawn.entropy[0]) / drawn.mask.sum()
    assert gap.value == pytest.approx(first, rel=1e-9)


def test_later_looks_ask_for_more():
    values = {"x": np.random.default_rng(0).standard_normal(400)}
    how = {"unit": np.arange(400), "resamples": 400, "seed": 0}

    def reach(look: int) -> float:
        found: Interval = token_means(values, **how, look=look)["x"]
        return found.high - found.value

    reaches = [reach(look) for look in (0, 1, 2, 30)]
    assert reaches == sorted(reaches)
    errors = [2 * stats.norm.sf(1.959964 * r / reaches[0]) for r in reaches[1:]]
    expected = [0.05 * 6 / (np.pi * look) ** 2 for look in (1, 2, 30)]
    assert errors == pytest.approx(expected, rel=1e-4)
    assert sum(0.05 * 6 / (np.pi * look) ** 2 for look in range(1, 10**5)) < 0.05
