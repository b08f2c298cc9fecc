"""Chapter 4: how often intervals cover, by simulation and against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from analysis.chapters import ch04_intervals as coverage
from analysis.experiments import ablation, recording, statistics
from analysis.experiments.summaries import of_seeds


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


def test_the_studentised_interval_turns_the_tails_round():
    values = np.random.default_rng(4).lognormal(sigma=0.6, size=(3, 12))
    low, high = coverage.bootstraps(values, np.random.default_rng(0))["studentised, mean"]
    mean = values.mean(axis=1)
    assert (high - mean > mean - low).all(), "skewed to the right, it reaches further there"
    near, far = coverage.bootstraps(-values, np.random.default_rng(0))["studentised, mean"]
    np.testing.assert_allclose((near, far), (-high, -low), rtol=1e-12)


def test_recorded_differences_are_standardised_and_many():
    differences = coverage.recorded_differences()
    assert len(differences) > 500 and differences.shape[1] == 10
    np.testing.assert_allclose(differences.mean(axis=1), 0.0, atol=1e-12)
    np.testing.assert_allclose(differences.std(axis=1, ddof=1), 1.0, rtol=1e-12)


def test_starts_of_their_own_add_what_the_simulation_adds():
    one, own = (recording.load(recording.folder_of(name)).finals for name in ("full", "starts"))
    ratios = []
    for variant, other, metric in ablation.COMPARISONS:
        variances = [
            (of_seeds(table, variant, metric, 0.3) - of_seeds(table, other, metric, 0.3)).var()
            for table in (one, own)
        ]
        ratios.append(variances[1] / variances[0])
    assert stats.gmean(ratios) == pytest.approx(1 + coverage.STARTS_ADD, abs=0.05)
