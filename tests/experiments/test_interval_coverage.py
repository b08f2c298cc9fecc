"""How often intervals cover, by simulation and against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from analysis.records import recording, statistics
from analysis.studies import interval_coverage as coverage

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize("share", [0.0, 0.07, 0.5, 8.0])
def test_the_interval_of_one_start_covers_the_mean_over_starts_as_often_as_a_simulation(share):
    rng = np.random.default_rng(7)
    of_start = np.sqrt(share) * rng.standard_normal((40000, 1))
    low, high = coverage.t_mean(of_start + rng.standard_normal((40000, 10)))
    held = ((low <= 0.0) & (high >= 0.0)).mean()
    assert coverage.of_one_start(share) == pytest.approx(held, abs=0.01)


def test_the_studentised_interval_turns_the_tails_round():
    values = np.random.default_rng(4).lognormal(sigma=0.6, size=(3, 12))
    low, high = coverage.bootstraps(values, np.random.default_rng(0))["studentised, mean"]
    mean = values.mean(axis=1)
    assert (high - mean > mean - low).all(), "skewed to the right, it reaches further there"
    near, far = coverage.bootstraps(-values, np.random.default_rng(0))["studentised, mean"]
    np.testing.assert_allclose((near, far), (-high, -low), rtol=1e-12)


@pytest.mark.parametrize("size", [4, 5, 10, 20])
def test_the_mean_of_the_middle_is_the_trimmed_mean_of_scipy(size):
    values = np.random.default_rng(6).standard_normal((40, 7, size))
    expected = stats.trim_mean(values, coverage.TRIM, axis=-1)
    np.testing.assert_allclose(coverage._middle_mean(values, -1), expected, rtol=1e-12, atol=1e-15)


def test_shares_of_several_samples_of_starts_are_those_of_each():
    means, within = np.random.default_rng(7).lognormal(size=(2, 5, 10, 3))
    several = coverage._start_share(means, within, 4)
    each = [coverage._start_share(*one, 4) for one in zip(means, within, strict=True)]
    np.testing.assert_array_equal(several, each)


def test_recorded_differences_are_standardised_and_many():
    differences = coverage.recorded_differences()
    assert len(differences) > 500 and differences.shape[1] == 10
    np.testing.assert_allclose(differences.mean(axis=1), 0.0, atol=1e-12)
    np.testing.assert_allclose(differences.std(axis=1, ddof=1), 1.0, rtol=1e-12)


def test_what_a_start_adds_is_that_of_an_analysis_of_variance():
    name, starts = "equal_kl_large_cuda", 20
    finals = recording.load(recording.RESULTS / name).finals
    wide = finals.pivot(index="seed", columns=["variant", "beta"], values="accuracy")
    shares = []
    for column in wide.columns[1:]:
        gaps = (wide[column] - wide.iloc[:, 0]).sort_index()
        groups = [gaps[gaps.index % starts == start] for start in range(starts)]
        f_ratio = stats.f_oneway(*groups).statistic
        freedom = starts * (len(groups[0]) - 1)
        shares.append((f_ratio * (freedom - 2) / freedom - 1) / len(groups[0]))
    row = coverage.start_shares().set_index("recording").loc[name]
    assert row["share"] == pytest.approx(np.mean(shares), rel=1e-9)
    assert (row["starts"], row["seeds"]) == (starts, 20)


@pytest.mark.parametrize("share", [0.0, 0.5, 3.0])
def test_of_planted_starts_it_is_unbiased(share):
    rng = np.random.default_rng(11)
    found = []
    for _ in range(3000):
        values = np.sqrt(share) * rng.standard_normal((10, 1, 1)) + rng.standard_normal((10, 2, 1))
        found.append(coverage._start_share(values.mean(axis=1), values.var(axis=1, ddof=1), 2))
    assert np.mean(found) == pytest.approx(share, abs=4 * np.std(found) / np.sqrt(3000))


def test_a_start_adds_little_to_a_kl_term_and_much_beside_a_teacher():
    rows = coverage.start_shares().set_index("recording")
    assert rows.loc["equal_kl_large_cuda", "high"] < 0.2
    assert rows.loc["equal_kl_large_cuda", "covered"] > 0.85
    assert rows.loc["distillation_sparse_cpu", "low"] > 1.0
    assert rows.loc["distillation_sparse_cpu", "covered"] < 0.4
