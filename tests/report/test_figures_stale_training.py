"""Figures of training on stale samples: what they draw, on small tables."""

from __future__ import annotations

import itertools

import pandas as pd
import pytest

from analysis.experiments.ablations.catalogue import make_preset
from analysis.experiments.chapters.routing_training import ROUTINGS
from analysis.experiments.chapters.stale_training import LARGE_BATCH
from analysis.report import style
from analysis.report.figures import stale_training as figures

SEEDS = range(6)


def table(arms: dict[str, float], **columns: list[float]) -> pd.DataFrame:
    """One row per arm, seed and combination of columns; every metric is the arm's number."""
    rows = [
        {"arm": arm, "beta": 0.0, "seed": seed, **dict(zip(columns, place, strict=True))}
        | dict.fromkeys(("accuracy", "own_accuracy", "reverse_kl", "ratio_ess", "entropy"), value)
        | {"gradient_norm": value}
        for (arm, value), seed in itertools.product(arms.items(), SEEDS)
        for place in itertools.product(*columns.values())
    ]
    return pd.DataFrame(rows)


def labels_of(axes) -> list[str]:
    return [text.get_text() for text in axes.get_yticklabels()]


def test_ages_draw_a_line_a_loss_over_the_lags_that_are_there():
    arms = {f"{name}_lag_{lag}": 0.1 + lag / 100 for name in figures.LOSSES for lag in (0, 16)}
    figure = figures.ages(table(arms))
    for panel in figure.axes:
        assert len(panel.containers) == len(figures.LOSSES)
    assert [text.get_text() for text in figure.axes[1].get_xticklabels()] == ["0", "16"]
    lines = [container[0] for container in figure.axes[0].containers]
    assert [line.get_ydata()[-1] for line in lines] == pytest.approx([0.26] * len(lines))


def test_peaks_are_of_one_age_on_a_log_axis():
    arms = {f"{name}_lag_{lag}": 1.0 + lag for name in figures.LOSSES for lag in (0, 16)}
    (axes,) = figures.peaks(table(arms), 16).axes
    assert labels_of(axes) == list(figures.LOSS_LABELS.values())
    assert axes.get_xscale() == "log"
    assert set(axes.containers[0][0].get_xdata()) == {17.0}


def test_every_way_is_drawn_and_the_samplers_log_ratio_is_hollow():
    arms = dict(zip(figures.WAYS, (0.1, 0.2, 0.3, 0.4, 0.5), strict=True))
    (axes,) = figures.ways(table(arms)).axes
    assert len(axes.containers) == len(figures.WAYS)
    looks = {arm: figures.way_look(arm) for arm in figures.WAYS}
    assert looks["merged_old"]["color"] == looks["merged_detached"]["color"]
    assert looks["merged_old"]["markerfacecolor"] == "white"
    assert "markerfacecolor" not in looks["merged_detached"]


def test_costs_are_drawn_to_half_as_much_again_as_the_cheapest_arm_has_cost():
    curves = table({"exact_loss": 0.2, LARGE_BATCH: 0.4}, update=[0, 5])
    rate = curves["arm"].map({"exact_loss": 1000, LARGE_BATCH: 4000})
    cost = rate * (curves["update"] + 5)
    figure = figures.at_cost(curves.assign(completions=cost, passes=10 * cost))
    assert figure.axes[0].get_xlim()[1] == pytest.approx(15.0)
    assert figure.axes[1].get_xlim()[1] == pytest.approx(150.0)
    assert [len(panel.get_lines()) for panel in figure.axes] == [2, 2]


def test_every_arm_of_the_masking_preset_has_a_row():
    names = [arm.name for arm in make_preset("stale_masking", {}).arms]
    assert set(names) == set(figures.MASKS)
    figure = figures.masks(table(dict.fromkeys(names, 0.3)))
    assert labels_of(figure.axes[0]) == list(figures.MASKS.values())


def test_every_arm_of_the_mismatch_preset_has_a_row():
    names = [arm.name for arm in make_preset("mismatch", {}).arms]
    figure = figures.mismatches(table(dict.fromkeys(names, 0.3)))
    assert len(labels_of(figure.axes[0])) == len(names)


def test_routings_have_a_panel_a_noise():
    curves = table(dict.fromkeys(ROUTINGS, 0.5), update=[0, 1], noise=[0.0, 0.3])
    curves = curves.rename(columns={"arm": "routing", "accuracy": "reward"})
    figure = figures.routings(curves)
    titles = [panel.get_title(loc="left") or panel.get_title() for panel in figure.axes]
    assert titles == ["noise 0", "noise 0.3"]
    colours = [line.get_color() for line in figure.axes[0].get_lines()]
    assert colours == [style.COLOURS["k2"], style.COLOURS["k1"]]


def test_decoding_steps_scale_the_updates_of_each_arm():
    names = [arm.name for arm in make_preset("partial_rollouts", {}).arms]
    assert set(names) == set(figures.BUDGETS)
    steps = {"whole": 15} | {name: int(name.split("_")[1]) for name in names if name != "whole"}
    figure = figures.decoding(table(dict.fromkeys(names, 0.3), update=[0, 10]), steps)
    ends = [[line.get_xdata()[-1] for line in panel.get_lines()] for panel in figure.axes]
    assert ends[0] == [10] * 5
    assert ends[1] == [10 * steps[arm] for arm in figures.BUDGETS]
