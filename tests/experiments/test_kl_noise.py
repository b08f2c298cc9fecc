"""The noise of a recorded KL, and differences at equal KL without it, where the truth is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.records import recording
from analysis.records.recording import Recording
from analysis.studies import kl_noise
from analysis.studies.presets import make_preset

STARTS, SEEDS, WINDOWS = 10, 60, 10
#: Of one reading of log KL.
NOISE = 0.25


def made(noise: float, *, cost: float = 0.03) -> Recording:
    """Two terms whose rewards lie ``cost`` apart at every KL, on a curve that rises steeply.

    They reach different KLs at equal coefficients, so noise moves their difference.
    """
    rng = np.random.default_rng(11)
    rows = []
    for variant, shift, extra in (("exact_loss", 0.5, 0.0), ("k2_loss", 0.0, -cost)):
        for beta in (0.1, 0.3, 1.0):
            for seed in range(SEEDS):
                log_kl = np.log(0.1) + shift - 0.4 * np.log10(beta) + rng.normal(0.0, 0.3)
                read = log_kl + rng.normal(0.0, noise, WINDOWS)
                reward = 0.5 + 0.1 * log_kl + extra + rng.normal(0.0, 0.01)
                rows += [
                    {
                        **{"variant": variant, "beta": beta, "seed": seed, "update": 10 * window},
                        **{"reverse_kl": np.exp(read[window]), "reward": reward},
                    }
                    for window in range(WINDOWS)
                ]
    curves = pd.DataFrame(rows)
    finals = curves[curves["update"] == 10 * (WINDOWS - 1)].drop(columns="update")
    preset = make_preset("stale_coefficients", {})
    assert preset.config.start.count == STARTS
    return Recording(preset, curves, finals.reset_index(drop=True), {})


def test_the_noise_is_what_was_added():
    assert kl_noise.deviations(made(NOISE).curves).to_numpy() == pytest.approx(NOISE, rel=0.15)
    share = NOISE**2 / (NOISE**2 + 0.3**2)
    assert kl_noise.shares(made(NOISE)).mean() == pytest.approx(share, rel=0.15)


def test_what_training_does_is_no_noise():
    moved = made(NOISE)
    curves = moved.curves.assign(
        reverse_kl=moved.curves["reverse_kl"] * np.exp(0.1 * moved.curves["update"])
    )
    same = kl_noise.deviations(moved.curves).to_numpy()
    assert kl_noise.deviations(curves).to_numpy() == pytest.approx(same)


def test_extrapolation_recovers_most_of_what_the_noise_hides():
    """The true difference is -0.03; noise hides a part, here by moving the runs along the curve."""
    plain, corrected = kl_noise.without_noise(made(NOISE), "k2_loss", "exact_loss", "reward")
    assert abs(plain + 0.03) > 0.01, "else there is nothing to correct"
    assert abs(corrected + 0.03) < 0.6 * abs(plain + 0.03)
    plain, corrected = kl_noise.without_noise(made(1e-3), "k2_loss", "exact_loss", "reward")
    assert plain == pytest.approx(-0.03, abs=0.004) and corrected == pytest.approx(plain, abs=1e-4)


def test_the_noise_of_a_recorded_kl_is_not_small():
    """ "Nearly the same sizes" stood beside it: one difference shrinks by a third."""
    recorded = recording.load(recording.folder_of("stale_coefficients"))
    assert kl_noise.shares(recorded).median() > 0.5
    pair = ("exact_loss", "k2_detached_loss", "own_accuracy")
    plain, corrected = kl_noise.without_noise(recorded, *pair)
    assert 0.02 < corrected < 0.75 * plain
