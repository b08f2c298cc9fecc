"""The figures of the chapter on the policy term show the arms they are given, by name."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.experiments.ablations.catalogue import make_preset
from analysis.report import style
from analysis.report.figures import objectives as figures


@pytest.fixture
def table() -> pd.DataFrame:
    luck = np.random.default_rng(0).normal(scale=0.01, size=10)
    rows = [
        {
            "arm": arm,
            "beta": 0.0,
            "seed": seed,
            "update": update,
            "accuracy": level + update / 100 + luck[seed],
            "entropy": 1 - level,
        }
        for arm, level in (("a", 0.1), ("b", 0.4), ("c", 0.7))
        for seed in range(10)
        for update in (0, 20, 40)
    ]
    return pd.DataFrame(rows)


def drawn(axes) -> dict[str, np.ndarray]:
    lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    return {line.get_label(): line.get_ydata() for line in lines}


def test_curves_show_each_group_of_arms_in_its_panel(table):
    panels = {"one": {"a": "A", "b": "B"}, "two": {"c": "C"}}
    first, second = figures.curves(table, panels, ("accuracy", "accuracy")).axes
    assert set(drawn(first)) == {"A", "B"}
    assert set(drawn(second)) == {"C"}
    np.testing.assert_allclose(np.diff(drawn(first)["A"]), 0.2)
    assert (drawn(first)["B"] > drawn(first)["A"]).all()
    (line,) = [line for line in first.get_lines() if line.get_label() == "A"]
    assert list(line.get_xdata()) == [10.0, 30.0, 50.0]  # middles of the windows


def test_what_is_called_alike_looks_alike(table):
    panels = {"one": {"a": "A", "b": "B"}, "two": {"c": "B", "a": "C"}}
    first, second = figures.curves(table, panels, ("accuracy", "accuracy")).axes
    colours = [
        {line.get_label(): line.get_color() for line in axes.get_lines()}
        for axes in (first, second)
    ]
    assert colours[0]["B"] == colours[1]["B"] != colours[0]["A"] != colours[1]["C"]


def test_several_metrics_of_the_same_arms(table):
    metrics = [("accuracy", "accuracy"), ("entropy", "entropy (nats)")]
    panels = figures.metrics_over_training(table, {"a": "A", "c": "C"}, metrics).axes
    assert [axes.get_ylabel() for axes in panels] == ["accuracy", "entropy (nats)"]
    np.testing.assert_allclose(drawn(panels[1])["C"], 0.3)
    colours = [line.get_color() for line in panels[0].get_lines()]
    assert len(set(colours)) == len(colours)
    assert set(colours) <= set(style.COLOURS.values())


@pytest.mark.parametrize(
    ("preset", "names"),
    [
        ("objectives", figures.OBJECTIVES),
        ("clip_higher", figures.CLIPS),
        ("near_ties", figures.ADVANTAGES),
        ("length_growth", figures.WEIGHTS | figures.BRAKES),
        ("dapo", figures.DAPO),
        ("process", figures.CREDITS),
    ],
)
def test_every_arm_of_a_preset_has_a_name(preset, names):
    arms = {arm.name.removesuffix("_noisy") for arm in make_preset(preset, {}).arms}
    assert arms == set(names)
    assert len(set(figures.LOOKS)) == len(figures.LOOKS) >= 5
