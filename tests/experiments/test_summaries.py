"""Means over seeds and paired differences, on tables whose answer is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.records.statistics import interval
from analysis.records.summaries import at_equal, by_variant, fluctuation, judged, paired, updates_to


def test_a_diverged_seed_leaves_no_interval():
    values = np.random.default_rng(0).normal(size=12) + 9.0
    values[3] = np.nan
    frame = table({("a", 0.0, "none"): values, ("b", 0.0, "none"): np.zeros(12)})
    found = judged(paired(frame, [("a", "b", "accuracy")]), 1)
    assert found[["mean", "low", "high", "p"]].isna().all(axis=None)
    assert found["verdict"][0] == "not estimable" and not found["differs"][0]


def table(variants, metric="accuracy", **columns):
    """One row per (variant, beta, seed); values [S] by (variant, beta)."""
    rows = [
        {"variant": variant, "beta": beta, "seed": seed, "kl_estimator": estimator, metric: value}
        for (variant, beta, estimator), values in variants.items()
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows).assign(**columns)


def test_by_variant_has_a_row_per_variant_beta_update_and_metric():
    luck = np.random.default_rng(0).normal(size=10)
    variants = {("b", 0.1, "k2"): luck, ("a", 0.3, "k2"): luck + 1, ("b", 0.3, "k2"): luck + 2}
    frame = pd.concat([table(variants, update=0), table(variants, update=20)])
    frame["length"] = 7.0
    found = by_variant(frame, ["accuracy", "length"])
    assert len(found) == 3 * 2 * 2 and set(found["seeds"]) == {10}
    assert list(found["variant"][:3]) == ["b", "a", "b"], "the order of the table"
    row = found[
        (found["variant"] == "b") & (found["beta"] == 0.3) & (found["metric"] == "accuracy")
    ]
    np.testing.assert_allclose(row[["mean", "low", "high"]], [interval(luck + 2)] * 2)
    flat = found[found["metric"] == "length"]
    assert (flat[["mean", "low", "high"]] == 7.0).all(axis=None)
    with pytest.raises(ValueError, match="metric must be one of"):
        by_variant(frame, ["acuracy"])
    assert "update" not in by_variant(
        frame[frame["update"] == 0].drop(columns="update"), ["length"]
    )


def test_by_variant_takes_seeds_by_name_not_by_place():
    frame = table({("a", 0.0, "none"): [1.0, 2.0, 3.0]})
    shuffled = frame.sample(frac=1.0, random_state=1)
    pd.testing.assert_frame_equal(
        by_variant(frame, ["accuracy"]), by_variant(shuffled, ["accuracy"])
    )


def test_paired_differences_cancel_the_luck_of_a_seed():
    luck = 10 * np.random.default_rng(0).normal(size=12)
    small = 0.1 * np.random.default_rng(1).normal(size=12)
    variants = {
        ("none", 0.0, "none"): luck,
        ("k2", 0.3, "k2"): luck + 0.5 + small,
        ("k2", 1.0, "k2"): luck - 3.0,
    }
    frame = table(variants).sample(frac=1.0, random_state=0)
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
    variants = {("near", 0.0, "none"): 0.52 + noise, ("far", 0.0, "none"): 0.54 - noise}
    frame = table(variants | {("here", 0.0, "none"): np.full(10, 0.5)})
    pairs = [(variant, "here", "accuracy") for variant in ("near", "far")]
    assert list(judged(paired(frame, pairs), 100)["verdict"]) == ["differs", "differs"]
    near, far = paired(frame, pairs)["equivalent"]
    assert near < 0.001 and far > 0.99, "0.02 is within the margin of 0.03, 0.04 is not"
    tiny = frame.assign(reverse_kl=frame["accuracy"] / 1e3)
    near, far = paired(tiny, [(*pair[:2], "reverse_kl") for pair in pairs])["equivalent"]
    assert near < 0.001 and far < 0.001, "4 and 8 per cent, at any size of the KL"
    double = tiny.assign(reverse_kl=tiny["reverse_kl"].where(tiny["variant"] == "here", 2e-3))
    assert paired(double, [("near", "here", "reverse_kl")])["equivalent"][0] > 0.99
    unmargined = frame.rename(columns={"accuracy": "length"})
    assert np.isnan(paired(unmargined, [("near", "here", "length")])["equivalent"][0])


def test_unclear_variants_are_refused():
    frame = table({("k2", 0.3, "k2"): [1.0, 2.0], ("k2", 1.0, "k2"): [1.0, 2.0]})
    with pytest.raises(ValueError, match="has betas"):
        paired(frame, [("k2", "k2", "accuracy")])
    with pytest.raises(ValueError, match="no variant 'k9'"):
        paired(frame, [("k9", "k2", "accuracy")], beta=0.3)


def test_updates_to_a_threshold():
    curves = pd.concat(
        pd.DataFrame(
            {
                "variant": variant,
                "beta": 0.0,
                "seed": seed,
                "update": [0, 20, 40],
                "accuracy": accuracy,
            }
        )
        for variant, seed, accuracy in (
            ("slow", 0, [0.1, 0.2, 0.6]),
            ("fast", 0, [0.1, 0.5, 0.4]),
            ("fast", 1, [0.7, 0.8, np.nan]),
            ("never", 0, [0.1, np.nan, np.nan]),
        )
    )
    found = updates_to(curves, "accuracy", 0.5)
    assert list(zip(found["variant"], found["seed"], found["update"], strict=True)) == [
        ("slow", 0, 40.0),
        ("fast", 0, 20.0),
        ("fast", 1, 0.0),
        ("never", 0, np.inf),
    ]


def fluctuation_of(values: np.ndarray) -> float:
    run = {"variant": "a", "beta": 0.1, "seed": 0, "kl_estimator": "k2"}
    curve = pd.DataFrame({"update": np.arange(len(values)) * 5, "reverse_kl": values, **run})
    return fluctuation(curve, ["reverse_kl"])["reverse_kl"].item()


def test_a_trend_is_no_fluctuation_and_noise_is_its_relative_spread():
    noise = 2.0 + 0.3 * np.random.default_rng(0).normal(size=4000)
    assert fluctuation_of(np.linspace(1.0, 2.0, 400)) < 2e-3
    assert fluctuation_of(noise) == pytest.approx(0.15, rel=0.05)


def test_only_the_second_half_counts():
    values = np.concatenate([np.tile([1.0, 9.0], 50), np.ones(100)])
    assert fluctuation_of(values) == 0.0
    assert fluctuation_of(values[::-1]) > 0.5


BETAS = (0.1, 0.3, 1.0)


def trade_offs(seeds: int = 6) -> pd.DataFrame:
    """``good`` lies 0.1 above ``bad`` at every KL; at equal beta it is the other way round."""
    rows = []
    for seed in range(seeds):
        for beta in BETAS:
            for variant, kl, lift in (("good", 0.2 / beta, 0.1), ("bad", 0.5 / beta, 0.0)):
                accuracy = 0.5 + 0.2 * np.log(kl) + lift + 0.01 * seed
                rows.append((variant, beta, seed, kl, accuracy))
    return pd.DataFrame(rows, columns=["variant", "beta", "seed", "reverse_kl", "accuracy"])


def test_the_curve_is_read_off_between_its_points():
    table = at_equal(trade_offs(1), ["good", "bad"], level=0.9, of="reverse_kl", metric="accuracy")
    good, bad = table.set_index("variant")["accuracy"][["good", "bad"]]
    assert good == pytest.approx(0.6 + 0.2 * np.log(0.9), abs=1e-12)
    assert bad == pytest.approx(0.5 + 0.2 * np.log(0.9), abs=1e-12)


def test_a_level_outside_the_curve_gives_nothing():
    table = at_equal(trade_offs(1), ["good", "bad"], level=4.0, of="reverse_kl", metric="accuracy")
    assert table.set_index("variant")["accuracy"].isna().to_dict() == {"good": True, "bad": False}


def test_seeds_that_do_not_reach_a_level_are_not_dropped():
    """Those that do are a selection: here they say +0.1 where variants are equal in the mean."""
    finals = trade_offs()
    worse = (finals["variant"] == "good") & (finals["seed"] < 3)
    # in half of the seeds the variant loses as much as it gains
    finals.loc[worse, "accuracy"] -= 0.2
    finals.loc[worse, "reverse_kl"] *= 0.2  # and never comes as far as the level
    finals.loc[worse, "accuracy"] += 0.2 * np.log(0.2)  # along the same curve
    values = at_equal(finals, ["good", "bad"], level=1.0, of="reverse_kl", metric="accuracy")
    gap = values.pivot(index="seed", columns="variant", values="accuracy").eval("good - bad")
    assert gap.isna().to_list() == [True] * 3 + [False] * 3
    assert gap.dropna().to_list() == pytest.approx([0.1] * 3)


def test_one_beta_is_no_curve():
    finals = trade_offs(1).query("beta == 0.3")
    with pytest.raises(ValueError, match="'good' has one beta"):
        at_equal(finals, ["good"], level=0.5, of="reverse_kl", metric="accuracy")
