"""The fronts: every arm is drawn where its seeds are, without a warning."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pandas as pd
import pytest

from analysis.experiments.ablations.summaries import paired_along
from analysis.report.figures import fronts


@pytest.fixture
def finals() -> pd.DataFrame:
    """Four seeds of every arm at three betas: a larger beta, a smaller KL."""
    rows = []
    for arm, beta, seed in itertools.product(fronts.ARMS, (1.0, 0.1, 0.3), range(4)):
        if arm == "none" and beta < 1.0:
            continue
        kl = (0.05 + 0.01 * seed) / beta
        rows.append((arm, 0.0 if arm == "none" else beta, seed, kl, 0.5 - 0.1 * np.log(kl)))
    return pd.DataFrame(rows, columns=["arm", "beta", "seed", "reverse_kl", "accuracy"])


def test_a_front_runs_through_the_points_of_its_betas(finals):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = fronts.fronts(finals)
    panel = figure.axes[0]
    k2 = next(c for c in panel.containers if c.get_label() == "$k_2$").lines[0]
    x = np.asarray(k2.get_xdata(), dtype=float)
    np.testing.assert_allclose(x, [0.65, 0.65 / 3, 0.065])  # betas in order
    assert panel.get_xscale() == "log"


def test_differences_stand_beside_the_margin(finals):
    pairs = [(arm, "exact_loss") for arm in ("k2_loss", "k3_loss")]
    whole = paired_along(finals, pairs, of="reverse_kl", metric="accuracy").assign(level="all")
    near = whole.assign(level="near", mean=whole["mean"] + 0.1, high=whole["high"] + 0.1)
    figure = fronts.differences(pd.concat([whole, near]), "the exact KL")
    axes = figure.axes[0]
    k2 = next(c for c in axes.containers if c.get_label() == "$k_2$ as a loss").lines[0]
    np.testing.assert_allclose(np.asarray(k2.get_xdata(), dtype=float), [0.0, 0.1], atol=1e-12)
    (margin,) = (patch for patch in axes.patches if patch.get_label() == "equivalent within")
    assert margin.get_x() == -0.03 and margin.get_width() == pytest.approx(0.06)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["all", "near"]


def test_dots_are_in_the_order_of_their_labels(finals):
    at_one = finals[finals["beta"].isin([0.0, 1.0])]
    labels = {"none": "no KL term", "k3_loss": "$k_3$", "k2_loss": "$k_2$"}
    figure = fronts.dots(at_one, labels, [("reverse_kl", "KL"), ("accuracy", "accuracy")])
    first = figure.axes[0]
    assert [label.get_text() for label in first.get_yticklabels()] == list(labels.values())
    assert first.get_ylim()[0] > first.get_ylim()[1], "the first label is on top"
