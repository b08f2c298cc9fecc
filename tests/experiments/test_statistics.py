"""The interval, its tests and verdicts: against scipy, by closed form, and by simulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from analysis.records import statistics
from analysis.records.config import Run
from analysis.records.variants import Variant
from analysis.training.tiny.start import supervised_start
from analysis.training.trainer import PopulationTrainer
from tests.experiments.tiny import make_tiny


@pytest.fixture(scope="module")
def values():
    return np.random.default_rng(0).lognormal(sigma=0.8, size=(40, 7)) - 1.2


def test_the_interval_and_its_p_value_are_scipy_s(values):
    tested = stats.ttest_1samp(values, 0.0, axis=1)
    for level in (0.95, 0.5):
        mean, low, high = statistics.interval(values, level=level)
        np.testing.assert_allclose(mean, values.mean(axis=1), rtol=1e-14)
        np.testing.assert_allclose((low, high), tested.confidence_interval(level), atol=1e-12)
    p = statistics.p_value(values)
    np.testing.assert_allclose(p, tested.pvalue, atol=1e-12)
    _, low, high = statistics.interval(values)
    assert ((p < 0.05) == ((low > 0) | (high < 0))).all() and 0 < (p < 0.05).mean() < 1


@pytest.mark.parametrize("margin", [0.1, 0.5, 2.0])
def test_equivalence_is_two_one_sided_tests(values, margin):
    above = stats.ttest_1samp(values, -margin, axis=1, alternative="greater").pvalue
    below = stats.ttest_1samp(values, margin, axis=1, alternative="less").pvalue
    p = statistics.equivalence(values, margin)
    np.testing.assert_allclose(p, np.maximum(above, below), atol=1e-12)
    _, low, high = statistics.interval(values, level=0.9)
    assert ((p < 0.05) == ((-margin < low) & (high < margin))).all()
    np.testing.assert_allclose(p, statistics.equivalence(-values, margin), atol=1e-12)


def test_a_mean_outside_the_margin_is_never_equivalent(values):
    outside = values - values.mean(axis=1, keepdims=True) + 0.6
    assert (statistics.equivalence(outside, 0.5) > 0.5).all()
    assert (statistics.p_value(outside) > 0.05).any(), "not seen to differ, and not the same"
    with pytest.raises(ValueError, match="margin must be finite and > 0"):
        statistics.equivalence(values, 0.0)


def test_equal_seeds_leave_no_doubt():
    same, apart = np.zeros(5), np.full(5, 0.25)
    assert statistics.interval(apart) == (0.25, 0.25, 0.25)
    assert (statistics.p_value(same), statistics.p_value(apart)) == (1.0, 0.0)
    assert (statistics.equivalence(same, 0.1), statistics.equivalence(apart, 0.1)) == (0.0, 1.0)


def test_few_or_diverged_seeds_give_no_interval():
    few = np.array([1.0, 1.1, 1.2])
    assert np.isnan(statistics.interval(few)[1:]).all()
    assert np.isnan(statistics.p_value(few)) and np.isnan(statistics.equivalence(few, 9.0))
    assert np.isnan(statistics.interval(np.array([1.0, 2.0, np.nan, 4.0, 5.0]))).all()


def test_seeds_that_share_a_start_are_one_observation():
    shift = np.array([0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 5.0, 5.0])
    jitter = np.array([-0.1, 0.1] * 4)
    means = statistics.of_starts(shift + jitter, np.repeat([7, 3, 9, 1], 2))
    np.testing.assert_allclose(means, [5.0, 1.0, 0.0, 2.0])  # starts in their order: 1, 3, 7, 9


def test_a_run_trains_from_the_start_that_its_seed_names():
    tiny = make_tiny().config
    config = tiny.model_copy(update={"start": tiny.start.model_copy(update={"count": 3})})
    runs = [Run(variant=Variant(), seed=seed) for seed in (7, 9, 5)]
    named = statistics.start_of(np.array([run.seed for run in runs]), 3)
    trained_from = PopulationTrainer(config, runs).weights.detach()
    assert torch.equal(trained_from, supervised_start(config)[named.tolist()])


@pytest.mark.parametrize(
    ("p", "equivalent", "comparisons", "said"),
    [
        (0.001, 1.0, 10, "differs"),
        (0.01, 1.0, 10, "suggestive"),  # alone it would differ
        (0.01, 1.0, 1, "differs"),
        (0.01, 0.01, 10, "equivalent"),
        (0.001, 0.01, 10, "differs"),
        (0.3, 0.3, 10, "unresolved"),
        (0.3, np.nan, 10, "unresolved"),  # no margin is stated
        (np.nan, np.nan, 10, "not estimable"),
    ],
)
def test_a_verdict_counts_the_comparisons_of_its_page(p, equivalent, comparisons, said):
    assert statistics.verdict(p, equivalent, comparisons) == said


def test_a_page_of_equal_variants_seldom_says_that_two_differ():
    pages, comparisons = 1000, 40
    p = statistics.p_value(np.random.default_rng(2).normal(size=(pages, comparisons, 10)))
    apart = [
        [[statistics.verdict(one, 1.0, n) == "differs" for one in page] for page in p[:300]]
        for n in (comparisons, 1)
    ]
    of_page, alone = (np.any(said, axis=1).mean() for said in apart)
    assert of_page < 0.09 and alone > 0.8
    assert (p.min(axis=1) * comparisons < 0.05).mean() == pytest.approx(0.05, abs=0.02)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda v: statistics.interval(v + 1j), "values"),
        (lambda v: statistics.interval(np.float64(1.0)), "values"),
        (lambda v: statistics.p_value(np.array(["a"] * 6)), "values"),
        (lambda v: statistics.interval(v, level=95), "level"),
        (lambda v: statistics.equivalence(v, np.nan), "margin"),
        (lambda v: statistics.equivalence(v, "0.1"), "margin"),
        (lambda v: statistics.of_estimate(0.1, -1.0, 5), "error"),
        (lambda v: statistics.of_estimate(0.1, 0.1, 5, -1.0), "margin"),
        (lambda v: statistics.of_starts(v, np.arange(5)), "starts"),
        (lambda v: statistics.of_starts(v, np.zeros((40, 7))), "starts"),
        (lambda v: statistics.verdict(-0.1, 0.1, 3), "p must be"),
        (lambda v: statistics.verdict(0.1, 0.1, 0), "comparisons"),
    ],
)
def test_arguments_that_are_none_are_named(values, call, named):
    with pytest.raises(ValueError, match=named):
        call(values)
    assert statistics.interval(values.tolist()).mean.shape == (40,)
