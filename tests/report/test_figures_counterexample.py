"""Chapter 3's figures: labelled axes with units, and marks where the numbers are."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.experiments.chapters import control_variate, counterexample, ratio_tail
from analysis.experiments.chapters.gaussian_pairs import LIU_APPENDIX_D, SCHULMAN_FAR
from analysis.report import style
from analysis.report.figures import control_variate as phase_figures
from analysis.report.figures import counterexample as figures

PRINTED_STD = (10_000, 2.4417)


def sweep():
    return counterexample.sample_size_sweep(
        LIU_APPENDIX_D, [50, 500, 5000], replicates=20, draws=100_000, seed=0
    )


def drifts():
    return control_variate.random_drifts(300, 10, ref_spread=1.5, farthest=3.0, seed=0)


def seeds():
    return figures.seeds(counterexample.printed_script_over(range(20)), counterexample.PRINTED)


def seen():
    edge = ratio_tail.largest_seen(LIU_APPENDIX_D, 1e4)
    return figures.seen(LIU_APPENDIX_D, ratio_tail.seen_interval(LIU_APPENDIX_D, edge), 0.44)


def sizes():
    predicted = pd.DataFrame({"sample_size": [1e2, 1e10, 1e20], "unseen": [0.5, 0.2, 0.05]})
    return figures.sample_sizes(sweep(), predicted, 0.01)


def growth():
    return figures.growing_std(sweep(), 0.46, PRINTED_STD)


def gaussian_phase():
    shifts = torch.linspace(0.01, 2, 20, dtype=torch.float64)
    scales = torch.linspace(0.05, 2, 21, dtype=torch.float64)
    ratio = control_variate.gaussian_phase(shifts, scales)
    points = {"printed": LIU_APPENDIX_D, "far": SCHULMAN_FAR}
    return phase_figures.gaussian_phase(shifts.numpy(), scales.numpy(), ratio, points)


def binary_phase():
    probabilities = torch.sigmoid(torch.linspace(-5, 5, 21, dtype=torch.float64))
    ratio = control_variate.binary_phase(probabilities)
    return phase_figures.binary_phase(probabilities.numpy(), ratio)


def wins():
    table = drifts()
    shares = control_variate.share_of_wins(table, np.logspace(-4, 2, 7), min_pairs=1)
    return phase_figures.softmax_wins(table, shares, 0.6)


def weight():
    return phase_figures.optimal_weight(drifts())


@pytest.mark.parametrize(
    ("make", "x_words", "y_words"),
    [
        (seeds, "relative error", "share of seeds"),
        (seen, "standard deviations", "density"),
        (sizes, "sample size", "relative error"),
        (growth, "sample size", "/ KL"),
        (gaussian_phase, "standard deviations", "width"),
        (binary_phase, "logit scale", "logit scale"),
        (wins, "nats", "share of pairs"),
        (weight, "nats", "weight"),
    ],
)
def test_axes_are_labelled_with_units(make, x_words, y_words):
    figure = make()
    across = figure._supylabel.get_text() if figure._supylabel else ""
    assert any(x_words in axes.get_xlabel() for axes in figure.axes)
    assert any(y_words in axes.get_ylabel() for axes in figure.axes) or y_words in across
    assert len(style.png(figure)) > 5000


def test_log_axes_say_so():
    for figure in (sizes(), growth(), wins(), weight()):
        for axes in figure.axes:
            if axes.get_xscale() == "log" and axes.get_xlabel():
                assert "log scale" in axes.get_xlabel()


def test_published_pairs_are_marked_where_they_are():
    marks = {
        tuple(line.get_xydata()[0])
        for line in gaussian_phase().axes[0].get_lines()
        if line.get_marker() == "o"
    }
    assert marks == {(0.1, 0.2), (1.0, 1.0)}


def test_the_printed_standard_deviation_is_marked():
    triangles = [ln for ln in growth().axes[0].get_lines() if ln.get_marker() == "v"]
    assert [tuple(ln.get_xydata()[0]) for ln in triangles] == [PRINTED_STD]
