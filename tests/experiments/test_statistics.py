"""The interval, its tests and verdicts: against scipy, by closed form, and by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from analysis.experiments import statistics
from analysis.experiments.ablations import ablation, recording
from analysis.experiments.ablations.summaries import of_seeds
from analysis.experiments.chapters import coverage


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
    with pytest.raises(ValueError, match="margin must be positive"):
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


def test_a_page_of_equal_arms_seldom_says_that_two_differ():
    pages, comparisons = 1000, 40
    p = statistics.p_value(np.random.default_rng(2).normal(size=(pages, comparisons, 10)))
    apart = [
        [[statistics.verdict(one, 1.0, n) == "differs" for one in page] for page in p[:300]]
        for n in (comparisons, 1)
    ]
    of_page, alone = (np.any(said, axis=1).mean() for said in apart)
    assert of_page < 0.09 and alone > 0.8
    assert (p.min(axis=1) * comparisons < 0.05).mean() == pytest.approx(0.05, abs=0.02)


@pytest.fixture(scope="module")
def covered():
    table = coverage.coverage_table((5, 10, 20), simulations=1000)
    return table.pivot_table(index=["population", "n"], columns="interval", values="coverage")


@pytest.mark.parametrize("population", ["recorded, smoothed", "recorded skewness", "normal"])
def test_the_interval_of_the_book_covers_as_often_as_it_says(covered, population):
    by_size = covered.loc[population, "t, mean"]
    assert by_size[5] > 0.92
    assert (by_size[[10, 20]] - statistics.LEVEL).abs().max() < 0.01


def test_percentile_bootstraps_of_few_seeds_do_not(covered):
    normal = covered.loc["normal"]
    assert (normal.loc[[5, 10], "percentile, mean"] < 0.92).all()
    assert normal.loc[5, "percentile, interquartile mean"] < 0.92
    assert (normal.loc[[5, 10], "BCa, mean"] < 0.92).all()


def test_where_a_run_in_ten_is_lost_no_interval_of_a_mean_covers(covered):
    of_means = [name for name in covered if name.endswith(", mean")]
    assert (covered.loc[("one run in ten is lost", 10), of_means] < 0.85).all()


def test_one_start_says_nothing_about_others():
    table = coverage.coverage_of_starts(simulations=4000).set_index(["starts", "seeds"])
    assert table.loc[(1, 10), "runs"] < 0.75 and table.loc[(5, 4), "runs"] < 0.9
    assert table.loc[[(5, 2), (5, 4), (10, 1)], "means"].between(0.94, 0.96).all()


def test_the_trimmed_interval_is_yuen_s_and_the_studentised_one_turns_the_tails_round():
    values = np.random.default_rng(4).lognormal(sigma=0.6, size=(3, 12))
    trimmed = coverage.t_trimmed(values)
    for row, sample in enumerate(values):
        yuen = stats.ttest_ind(sample, np.zeros(12), equal_var=False, trim=0.25)
        found = (trimmed.low[row], trimmed.high[row])
        np.testing.assert_allclose(found, yuen.confidence_interval(), atol=1e-12)
    low, high, _ = coverage.bootstraps(values, np.random.default_rng(0))["studentised, mean"]
    mean = values.mean(axis=1)
    assert (high - mean > mean - low).all(), "skewed to the right, it reaches further there"
    near, far, _ = coverage.bootstraps(-values, np.random.default_rng(0))["studentised, mean"]
    np.testing.assert_allclose((near, far), (-high, -low), rtol=1e-12)


def test_recorded_differences_are_standardised_and_many():
    differences = coverage.recorded_differences()
    assert len(differences) > 500 and differences.shape[1] == 10
    np.testing.assert_allclose(differences.mean(axis=1), 0.0, atol=1e-12)
    np.testing.assert_allclose(differences.std(axis=1, ddof=1), 1.0, rtol=1e-12)


def test_starts_of_their_own_add_what_the_simulation_adds():
    one, own = (recording.load(recording.folder_of(name)).finals for name in ("full", "starts"))
    ratios = []
    for arm, other, metric in ablation.COMPARISONS:
        variances = [
            (of_seeds(table, arm, metric, 0.3) - of_seeds(table, other, metric, 0.3)).var()
            for table in (one, own)
        ]
        ratios.append(variances[1] / variances[0])
    assert stats.gmean(ratios) == pytest.approx(1 + coverage.STARTS_ADD, abs=0.05)
