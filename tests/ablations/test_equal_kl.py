"""Accuracy read off at equal KL, on curves whose answer is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.experiments.ablations.summaries import at_equal, paired_at_equal

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
    assert (inside["iqm"], inside["low"], inside["high"]) == pytest.approx((0.1,) * 3, abs=1e-9)
    assert inside["seeds"] == 6 and outside["seeds"] == 0 and np.isnan(outside["iqm"])


def test_one_beta_is_no_curve():
    finals = fronts(1).query("beta == 0.3")
    with pytest.raises(ValueError, match="'good' has one beta"):
        at_equal(finals, ["good"], level=0.5, of="reverse_kl", metric="accuracy")
