"""What GRPO is said to suffer from: by plain counts over the recorded seeds, and its contrary."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.experiments.ablations import recording
from analysis.experiments.claims import training_troubles as claims
from analysis.experiments.claims.recorded import recorded

SEEDS = 10


def ends(preset: str, arm: str, metric: str) -> np.ndarray:
    finals = recorded(preset).finals
    return finals[finals["arm"] == arm].sort_values("seed")[metric].to_numpy()


def test_instabilities():
    found = claims.instabilities()
    assert found.verdict == "holds if"
    assert found.figures["advantage_of_noise"] > 0.5
    assert found.figures["advantage_of_noise_clipped"] < 0.02
    noisy, plain = (ends("near_ties", f"group_std{s}", "accuracy") for s in ("_noisy", ""))
    assert len(noisy) == len(plain) == SEEDS
    assert (noisy < plain).sum() >= 8  # a sign test at about 5%
    assert found.figures["noise_cost"] == pytest.approx((noisy - plain).mean())
    assert found.figures["noise_cost_high"] < 0 < found.figures["noise_cost_floored_high"]


def test_a_floor_under_the_division_is_no_division_by_noise():
    noisy, plain = (ends("near_ties", f"std_min{s}", "accuracy") for s in ("_noisy", ""))
    assert 2 < (noisy < plain).sum() < 8


def test_the_change_over_training_by_hand():
    curves = recorded("near_ties").curves
    one = curves[curves["arm"] == "group_std_noisy"]
    last = one["update"].max()
    changes = [
        rows.loc[rows["update"] == last, "accuracy"].item()
        - rows.loc[rows["update"] == 0, "accuracy"].item()
        for _, rows in one.groupby("seed")
    ]
    band = claims.over_training(curves, "group_std_noisy", "accuracy")
    assert band.mean == pytest.approx(np.mean(changes))
    assert band.low < band.mean < band.high < 0


def test_runs_without_these_troubles_would_say_fails(monkeypatch):
    def untroubled(preset: str) -> recording.Recorded:
        real = recorded(preset)
        steady = real.curves.assign(entropy=1.0, accuracy=real.curves["update"] / 1000)
        spread = real.finals["seed"] / 1e4
        return real._replace(curves=steady, finals=real.finals.assign(accuracy=0.5 + spread))

    monkeypatch.setattr(claims, "recorded", untroubled)
    assert claims.instabilities().verdict == "fails"


def test_runs_with_all_of_them_would_say_holds(monkeypatch):
    def troubled(preset: str) -> recording.Recorded:
        real = recorded(preset)
        falling = 1.0 - real.curves["update"] / 1000 * 5
        return real._replace(curves=real.curves.assign(entropy=falling, accuracy=falling))

    monkeypatch.setattr(claims, "recorded", troubled)
    assert claims.instabilities().verdict == "holds"
