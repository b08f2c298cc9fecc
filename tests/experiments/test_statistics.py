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


@pytest.mark.parametrize(("mean", "margin"), [(0.03, 0.1), (-0.2, 0.1), (0.0, None)])
def test_an_estimate_is_judged_as_scipy_s_t_has_it(mean, margin):
    t = stats.t(7, loc=mean, scale=0.04)
    found = statistics.of_estimate(mean, 0.04, 7, margin)
    same = np.nan if margin is None else max(t.cdf(-margin), t.sf(margin))
    low, high = t.interval(0.95)
    expected = {"mean": mean, "low": low, "high": high, "equivalent": same}
    expected["p"] = 2 * min(t.cdf(0.0), t.sf(0.0))
    assert found == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_an_estimate_without_error_is_certain():
    found = statistics.of_estimate(0.2, 0.0, 7, 0.3)
    assert found == {"mean": 0.2, "low": 0.2, "high": 0.2, "p": 0.0, "equivalent": 0.0}


@pytest.mark.parametrize("power", [0.1, 0.8, 0.999])
@pytest.mark.parametrize("count", [4, 10])
def test_what_is_detected_exceeds_the_edge_so_often(count, power):
    """Boost's noncentral t for that of Cephes, and the quantile of the central one."""
    found = statistics.detectable(0.5, count, power=power)
    centre = found * np.sqrt(count) / 0.5
    edge = stats.t.ppf(0.975, count - 1)
    assert stats.nct.sf(edge, count - 1, centre) == pytest.approx(power, abs=1e-6)
    default = statistics.detectable(0.5, count)
    assert (default == found) == (power == 0.8)


def test_four_seeds_are_enough_for_an_interval():
    values = np.array([1.0, 1.5, 0.5, 1.0])
    assert np.isfinite(statistics.interval(values)).all()


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
    two = statistics.of_starts(np.stack([shift, 3 * shift + 1]), np.repeat([7, 3, 9, 1], 2))
    np.testing.assert_allclose(two, [[5.0, 1.0, 0.0, 2.0], [16.0, 4.0, 1.0, 7.0]])


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
        (0.0, 1.0, 10, "differs"),
        (1.0, 0.3, 1, "unresolved"),
        # neither is below the level: the interval ends at zero, or at the margin
        (1.0 - statistics.LEVEL, 1.0 - statistics.LEVEL, 1, "unresolved"),
        ((1.0 - statistics.LEVEL) / 2, 0.3, 2, "suggestive"),
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
        (lambda v: statistics.interval(v, level=1.5), "level"),
        (lambda v: statistics.t_quantile(5, level=1.0), "level"),
        (lambda v: statistics.t_quantile(5, level=0.0), "level"),
        (lambda v: statistics.equivalence(v, np.nan), "margin"),
        (lambda v: statistics.equivalence(v, "0.1"), "margin"),
        (lambda v: statistics.of_estimate(0.1, -1.0, 5), "error"),
        (lambda v: statistics.of_estimate(0.1, 0.1, 5, -1.0), "margin"),
        (lambda v: statistics.of_starts(v, np.arange(5)), "starts"),
        (lambda v: statistics.of_starts(v, np.zeros((40, 7))), "starts"),
        (lambda v: statistics.verdict(-0.1, 0.1, 3), "p must be"),
        (lambda v: statistics.verdict(1.1, 0.1, 3), "p must be"),
        (lambda v: statistics.verdict(0.1, 0.1, 0), "comparisons"),
    ],
)
def test_arguments_that_are_none_are_named(values, call, named):
    with pytest.raises(ValueError, match=named):
        call(values)
    assert statistics.interval(values.tolist()).mean.shape == (40,)
