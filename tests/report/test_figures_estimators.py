"""Chapter 1's figures: labelled axes with units, and the right data behind the lines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from analysis.experiments.chapters import estimator_values as study
from analysis.experiments.chapters.gaussian_pairs import SCHULMAN_FAR, SCHULMAN_NEAR, draw
from analysis.report import style
from analysis.report.figures import estimators as figures

REFERENCE = study.zipf_logits(50, 1.2)
DIRECTION = draw((50,), seed=1)
STEPS = torch.linspace(0.1, 3, 12, dtype=torch.float64)


def drift():
    return figures.drift(study.drift_table(REFERENCE, DIRECTION, STEPS), 0.5)


def schulman():
    pairs = {"shift 0.1": SCHULMAN_NEAR, "shift 1": SCHULMAN_FAR}
    return figures.schulman(
        {name: study.schulman_table(pair, sample_size=1000, seed=0) for name, pair in pairs.items()}
    )


def tails():
    estimates, weights = study.gaussian_estimates(SCHULMAN_FAR)
    thresholds = torch.logspace(-1, 2, 50, dtype=torch.float64)
    curves = study.tail_curves(estimates, weights, SCHULMAN_FAR.kl, thresholds)
    return figures.tails({"one": curves, "two": curves})


def binary():
    probabilities = torch.linspace(0.05, 0.95, 9, dtype=torch.float64)
    return figures.binary_bias(study.binary_bias(0.2, probabilities), 0.2)


def stale():
    policy = REFERENCE + DIRECTION
    return figures.stale(
        {
            sign: study.stale_table(policy, REFERENCE, float(sign) * DIRECTION, STEPS / 4)
            for sign in ("1", "-1")
        }
    )


@pytest.mark.parametrize(
    ("make", "x_unit", "y_unit"),
    [
        (drift, "nats", "/ KL"),
        (schulman, "/ KL", None),
        (tails, "/ KL", "probability"),
        (binary, "probability", "/ KL"),
        (stale, "nats", "nats"),
    ],
)
def test_axes_are_labelled_with_units(make, x_unit, y_unit):
    figure = make()
    shared = figure._supxlabel.get_text() if figure._supxlabel else ""
    assert any(x_unit in axes.get_xlabel() for axes in figure.axes) or x_unit in shared
    assert y_unit is None or any(y_unit in axes.get_ylabel() for axes in figure.axes)
    assert len(style.png(figure)) > 5000


def test_log_axes_say_so():
    for figure in (drift(), schulman(), tails()):
        text = " ".join(
            [axes.get_xlabel() + axes.get_ylabel() for axes in figure.axes]
            + ([figure._supxlabel.get_text()] if figure._supxlabel else [])
        )
        scales = {axes.get_xscale() for axes in figure.axes}
        assert "log" in scales and "log scale" in text


def test_drift_draws_the_standard_deviations_of_the_table():
    table = study.drift_table(REFERENCE, DIRECTION, STEPS)
    panel = figures.drift(table, 0.5).axes[1]
    for line in panel.get_lines():
        if line.get_label() == style.LABELS["k3"]:
            rows = table[table.estimator == "k3"]
            assert np.array_equal(line.get_ydata(), rows["std"])
            break
    else:
        pytest.fail("k3 is not drawn")
