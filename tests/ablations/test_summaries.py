"""Means over seeds and paired differences, on tables whose answer is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.experiments.ablations.summaries import by_arm, judged, paired, tally, updates_to
from analysis.experiments.statistics import interval


def test_a_diverged_seed_leaves_no_interval():
    values = np.random.default_rng(0).normal(size=12) + 9.0
    values[3] = np.nan
    frame = table({("a", 0.0, "none"): values, ("b", 0.0, "none"): np.zeros(12)})
    found = judged(paired(frame, [("a", "b", "accuracy")]), 1)
    assert found[["mean", "low", "high", "p"]].isna().all(axis=None)
    assert found["verdict"][0] == "not estimable" and not found["differs"][0]


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
    np.testing.assert_allclose(row[["mean", "low", "high"]], [interval(luck + 2)] * 2)
    flat = found[found["metric"] == "length"]
    assert (flat[["mean", "low", "high"]] == 7.0).all(axis=None)
    spread = by_arm(frame, ["accuracy"], band="range").iloc[0]
    assert (spread["low"], spread["high"]) == (luck.min(), luck.max())
    with pytest.raises(ValueError, match="metric must be one of"):
        by_arm(frame, ["acuracy"])
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
    np.testing.assert_allclose(found.loc[0, ["mean", "low", "high"]], interval(0.5 + small))
    np.testing.assert_allclose(
        found.loc[1, ["mean", "high", "low"]], -found.loc[0, ["mean", "low", "high"]]
    )
    assert judged(found, 2)["differs"].all() and list(found["seeds"]) == [12, 12]
    same = judged(paired(frame, [("k2", "k2", "accuracy")], beta=1.0), 1)
    assert same["mean"][0] == 0 and same["verdict"][0] == "equivalent"


def test_accuracies_are_one_within_a_margin_and_kls_within_a_ratio():
    noise = 0.002 * np.random.default_rng(3).normal(size=10)
    arms = {("near", 0.0, "none"): 0.52 + noise, ("far", 0.0, "none"): 0.54 - noise}
    frame = table(arms | {("here", 0.0, "none"): np.full(10, 0.5)})
    pairs = [(arm, "here", "accuracy") for arm in ("near", "far")]
    assert list(judged(paired(frame, pairs), 100)["verdict"]) == ["differs", "differs"]
    near, far = paired(frame, pairs)["equivalent"]
    assert near < 0.001 and far > 0.99, "0.02 is within the margin of 0.03, 0.04 is not"
    tiny = frame.assign(reverse_kl=frame["accuracy"] / 1e3)
    near, far = paired(tiny, [(*pair[:2], "reverse_kl") for pair in pairs])["equivalent"]
    assert near < 0.001 and far < 0.001, "4 and 8 per cent, at any size of the KL"
    double = tiny.assign(reverse_kl=tiny["reverse_kl"].where(tiny["arm"] == "here", 2e-3))
    assert paired(double, [("near", "here", "reverse_kl")])["equivalent"][0] > 0.99
    unmargined = frame.rename(columns={"accuracy": "length"})
    assert np.isnan(paired(unmargined, [("near", "here", "length")])["equivalent"][0])


def test_a_page_counts_its_verdicts_and_its_comparisons():
    columns = ["p", "equivalent"]
    one = pd.DataFrame([(0.001, 1.0), (0.04, 1.0)], columns=columns)
    other = pd.DataFrame([(0.5, 0.01), (0.5, 0.5), (np.nan, np.nan)], columns=columns)
    found = tally([one, other], 5)
    assert found == {
        "comparisons": 5,
        "differing": 1,
        "equivalent": 1,
        "suggestive": 1,
        "unresolved": 1,
        "excluding": 2,
        "by_chance": 0,
    }
    with pytest.raises(ValueError, match="set comparisons=5"):
        tally([one, other], 4)


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
