"""The fronts: every arm is drawn where its seeds are, without a warning."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pandas as pd
import pytest

from analysis.experiments.ablations.summaries import paired_at_equal
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


def test_differences_leave_out_what_no_seed_reaches(finals):
    table = paired_at_equal(
        finals, [("k2_loss", "exact_loss")], (0.1, 50.0), of="reverse_kl", metric="accuracy"
    )
    figure = fronts.differences(table, "the exact KL")
    (line,) = (ln for ln in figure.axes[0].get_lines() if ln.get_label() == "$k_2$")
    np.testing.assert_allclose(line.get_xdata(), [0.1])
    np.testing.assert_allclose(line.get_ydata(), [0.0], atol=1e-12)


def test_dots_are_in_the_order_of_their_labels(finals):
    at_one = finals[finals["beta"].isin([0.0, 1.0])]
    labels = {"none": "no KL term", "k3_loss": "$k_3$", "k2_loss": "$k_2$"}
    figure = fronts.dots(at_one, labels, [("reverse_kl", "KL"), ("accuracy", "accuracy")])
    first = figure.axes[0]
    assert [label.get_text() for label in first.get_yticklabels()] == list(labels.values())
    assert first.get_ylim()[0] > first.get_ylim()[1], "the first label is on top"
