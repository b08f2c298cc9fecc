"""Interquartile means, bootstrap bands and paired differences, against scipy and by simulation."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import trim_mean

from analysis.experiments.ablations.summaries import (
    bootstrap,
    by_arm,
    interquartile_mean,
    paired,
    updates_to,
)


@pytest.mark.parametrize("seeds", [1, 2, 3, 4, 5, 7, 8, 10, 11, 16, 33])
def test_the_interquartile_mean_is_scipy_s_trimmed_mean(seeds):
    values = np.random.default_rng(seeds).lognormal(sigma=2.0, size=(6, seeds))
    np.testing.assert_allclose(interquartile_mean(values), trim_mean(values, 0.25, axis=1))
    if seeds >= 4:
        assert (np.abs(interquartile_mean(values) - values.mean(1)) > 1e-3).any()


def test_the_interquartile_mean_by_hand():
    assert interquartile_mean(np.array([8.0, 1.0, 100.0, 2.0, 4.0, -50.0, 3.0, 9.0])) == 4.25
    assert np.isnan(interquartile_mean(np.array([1.0, np.nan, 2.0, 3.0])))


@pytest.mark.parametrize("statistic", [interquartile_mean, lambda x: x.mean(axis=-1)])
def test_the_band_covers_the_truth_about_as_often_as_it_says(statistic):
    values = np.random.default_rng(3).normal(size=(600, 20))
    low, high = bootstrap(values, statistic)
    covered = ((low <= 0) & (high >= 0)).mean()
    assert 0.89 < covered < 0.96  # a percentile bootstrap of 20 values covers slightly too little
    narrow = bootstrap(values, statistic, level=0.5)
    assert 0.42 < ((narrow[0] <= 0) & (narrow[1] >= 0)).mean() < 0.56
    point = statistic(values)
    assert ((low < point) & (point < high)).mean() > 0.999


def test_rows_are_resampled_together_and_the_same_every_time():
    values = np.random.default_rng(0).normal(size=(2, 12))
    first, again = bootstrap(values), bootstrap(values)
    assert np.array_equal(first, again)
    shifted = bootstrap(values + 5.0)
    np.testing.assert_allclose(np.array(shifted) - np.array(first), 5.0)


def test_a_diverged_seed_leaves_no_interval():
    values = np.random.default_rng(0).normal(size=(2, 12)) + 9.0
    values[0, 3] = np.nan
    low, high = bootstrap(values)
    assert np.isnan([low[0], high[0]]).all() and low[1] < high[1]
    frame = table({("a", 0.0, "none"): values[0], ("b", 0.0, "none"): np.zeros(12)})
    found = paired(frame, [("a", "b", "accuracy")])
    assert np.isnan(found["iqm"][0]) and np.isnan(found["low"][0]) and not found["differs"][0]


def table(arms, metric="accuracy", **columns):
    """One row per (arm, beta, seed); values [S] by (arm, beta)."""
    rows = [
        {"arm": arm, "beta": beta, "seed": seed, "kl_estimator": estimator, metric: value}
        for (arm, beta, estimator), values in arms.items()
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows).assign(**columns)


def test_by_arm_has_a_row_per_arm_beta_update_and_metric():
    luck = np.random.default_rng(0).normal(size=10)
    arms = {("b", 0.1, "k2"): luck, ("a", 0.3, "k2"): luck + 1, ("b", 0.3, "k2"): luck + 2}
    frame = pd.concat([table(arms, update=0), table(arms, update=20)])
    frame["length"] = 7.0
    found = by_arm(frame, ["accuracy", "length"])
    assert len(found) == 3 * 2 * 2 and set(found["seeds"]) == {10}
    assert list(found["arm"][:3]) == ["b", "a", "b"], "the order of the table"
    row = found[(found["arm"] == "b") & (found["beta"] == 0.3) & (found["metric"] == "accuracy")]
    np.testing.assert_allclose(row["iqm"], interquartile_mean(luck + 2))
    ((low,), (high,)) = bootstrap(luck[None] + 2)
    np.testing.assert_allclose(row[["low", "high"]], [[low, high]] * 2)
    flat = found[found["metric"] == "length"]
    assert (flat[["iqm", "low", "high"]] == 7.0).all(axis=None)
    assert "update" not in by_arm(frame[frame["update"] == 0].drop(columns="update"), ["length"])


def test_by_arm_takes_seeds_by_name_not_by_place():
    frame = table({("a", 0.0, "none"): [1.0, 2.0, 3.0]})
    shuffled = frame.sample(frac=1.0, random_state=1)
    pd.testing.assert_frame_equal(by_arm(frame, ["accuracy"]), by_arm(shuffled, ["accuracy"]))


def test_paired_differences_cancel_the_luck_of_a_seed():
    luck = 10 * np.random.default_rng(0).normal(size=12)
    small = 0.1 * np.random.default_rng(1).normal(size=12)
    arms = {
        ("none", 0.0, "none"): luck,
        ("k2", 0.3, "k2"): luck + 0.5 + small,
        ("k2", 1.0, "k2"): luck - 3.0,
    }
    frame = table(arms).sample(frac=1.0, random_state=0)
    found = paired(frame, [("k2", "none", "accuracy"), ("none", "k2", "accuracy")], beta=0.3)
    np.testing.assert_allclose(found["iqm"][0], interquartile_mean(0.5 + small))
    np.testing.assert_allclose(found["iqm"][1], -found["iqm"][0])
    assert found["differs"].all() and found["low"][0] > 0.3 and found["high"][0] < 0.7
    np.testing.assert_allclose(
        [found["low"][1], found["high"][1]], [-found["high"][0], -found["low"][0]], rtol=0.05
    )
    assert list(found["seeds"]) == [12, 12]
    same = paired(frame, [("k2", "k2", "accuracy")], beta=1.0)
    assert same["iqm"][0] == 0 and not same["differs"][0]


def test_unclear_arms_are_refused():
    frame = table({("k2", 0.3, "k2"): [1.0, 2.0], ("k2", 1.0, "k2"): [1.0, 2.0]})
    with pytest.raises(ValueError, match="has betas"):
        paired(frame, [("k2", "k2", "accuracy")])
    with pytest.raises(ValueError, match="no arm 'k9'"):
        paired(frame, [("k9", "k2", "accuracy")], beta=0.3)


def test_updates_to_a_threshold():
    curves = pd.concat(
        pd.DataFrame(
            {"arm": arm, "beta": 0.0, "seed": seed, "update": [0, 20, 40], "accuracy": accuracy}
        )
        for arm, seed, accuracy in (
            ("slow", 0, [0.1, 0.2, 0.6]),
            ("fast", 0, [0.1, 0.5, 0.4]),
            ("fast", 1, [0.7, 0.8, np.nan]),
            ("never", 0, [0.1, np.nan, np.nan]),
        )
    )
    found = updates_to(curves, "accuracy", 0.5)
    assert list(zip(found["arm"], found["seed"], found["update"], strict=True)) == [
        ("slow", 0, 40.0),
        ("fast", 0, 20.0),
        ("fast", 1, 0.0),
        ("never", 0, np.inf),
    ]
