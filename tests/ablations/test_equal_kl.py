"""Accuracy read off at equal KL, on curves whose answer is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.experiments.ablations.summaries import at_equal, judged, paired_along, paired_at_equal

BETAS = (0.1, 0.3, 1.0)


def fronts(seeds: int = 6) -> pd.DataFrame:
    """``good`` lies 0.1 above ``bad`` at every KL; at equal beta it is the other way round."""
    rows = []
    for seed in range(seeds):
        for beta in BETAS:
            for arm, kl, lift in (("good", 0.2 / beta, 0.1), ("bad", 0.5 / beta, 0.0)):
                accuracy = 0.5 + 0.2 * np.log(kl) + lift + 0.01 * seed
                rows.append((arm, beta, seed, kl, accuracy))
    return pd.DataFrame(rows, columns=["arm", "beta", "seed", "reverse_kl", "accuracy"])


def test_the_curve_is_read_off_between_its_points():
    table = at_equal(fronts(1), ["good", "bad"], level=0.9, of="reverse_kl", metric="accuracy")
    good, bad = table.set_index("arm")["accuracy"][["good", "bad"]]
    assert good == pytest.approx(0.6 + 0.2 * np.log(0.9), abs=1e-12)
    assert bad == pytest.approx(0.5 + 0.2 * np.log(0.9), abs=1e-12)


def test_a_level_outside_the_curve_gives_nothing():
    table = at_equal(fronts(1), ["good", "bad"], level=4.0, of="reverse_kl", metric="accuracy")
    assert table.set_index("arm")["accuracy"].isna().to_dict() == {"good": True, "bad": False}


def test_at_equal_kl_the_better_front_wins_though_it_loses_at_equal_beta():
    finals = fronts()
    at_beta = finals[finals["beta"] == 0.3].pivot(index="seed", columns="arm", values="accuracy")
    assert (at_beta["good"] < at_beta["bad"]).all()
    table = paired_at_equal(
        finals, [("good", "bad")], [0.6, 4.0], of="reverse_kl", metric="accuracy"
    )
    inside, outside = table.to_dict("records")
    assert (inside["mean"], inside["low"], inside["high"]) == pytest.approx((0.1,) * 3, abs=1e-9)
    assert inside["reached"] == 6 and outside["reached"] == 0 and np.isnan(outside["mean"])
    (along,) = paired_along(finals, [("good", "bad")], of="reverse_kl", metric="accuracy").to_dict(
        "records"
    )
    assert (along["mean"], along["low"], along["high"]) == pytest.approx((0.1,) * 3, abs=1e-9)


def test_seeds_that_do_not_reach_a_level_are_not_dropped():
    """Those that do are a selection: here they say +0.1 where the arms are equal in the mean."""
    finals = fronts()
    worse = (finals["arm"] == "good") & (finals["seed"] < 3)
    finals.loc[worse, "accuracy"] -= 0.2  # in half of the seeds the arm loses as much as it gains
    finals.loc[worse, "reverse_kl"] *= 0.2  # and never comes as far as the level
    finals.loc[worse, "accuracy"] += 0.2 * np.log(0.2)  # along the same curve
    table = paired_at_equal(finals, [("good", "bad")], [1.0], of="reverse_kl", metric="accuracy")
    assert table["reached"][0] == 3 and table["seeds"][0] == 6
    assert table[["mean", "low", "high", "p"]].isna().all(axis=None)
    assert judged(table, 1)["verdict"][0] == "not estimable"
    whole = paired_along(finals, [("good", "bad")], of="reverse_kl", metric="accuracy")
    assert whole["reached"][0] == 3, "of three seeds the curves do not overlap at all"
    finals.loc[worse, "reverse_kl"] *= 4.0
    finals.loc[worse, "accuracy"] += 0.2 * np.log(4.0)
    whole = paired_along(finals, [("good", "bad")], of="reverse_kl", metric="accuracy")
    assert whole["reached"][0] == 6 and whole["mean"][0] == pytest.approx(0.0, abs=1e-9)


def test_an_average_over_all_that_is_shared_may_hide_two_gaps():
    finals = fronts()
    curved = finals["arm"] == "good"
    log_kl = np.log(finals["reverse_kl"])
    low, high = np.log(0.5), np.log(2.0)  # what the curves of each seed share
    finals.loc[curved, "accuracy"] += 0.1 * (log_kl - (low + high) / 2) - 0.1
    gaps = [
        paired_along(finals, [("good", "bad")], of="reverse_kl", metric="accuracy", part=part)
        for part in ((0.0, 1.0), (0.0, 0.5), (0.5, 1.0))
    ]
    quarter = 0.1 * (high - low) / 4  # the middle of a half is a quarter of the range away
    expected = [0.0, -quarter, quarter]
    assert [gap["mean"][0] for gap in gaps] == pytest.approx(expected, abs=1e-9)


def test_one_beta_is_no_curve():
    finals = fronts(1).query("beta == 0.3")
    with pytest.raises(ValueError, match="'good' has one beta"):
        at_equal(finals, ["good"], level=0.5, of="reverse_kl", metric="accuracy")
