"""Figures of the trained chapters: their points are means of the given runs."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from analysis.chapters import (
    ch17_stale,
    ch18_distillation,
)
from analysis.chapters import training_figures as figures
from analysis.chapters.claims import recorded
from analysis.experiments.statistics import interval

SEEDS = range(6)
METRICS = ("accuracy", "own_accuracy", "reverse_kl", "ratio_ess", "entropy", "gradient_norm")


def table(variants: dict[str, float], **columns: list[float]) -> pd.DataFrame:
    """One row per variant, seed and combination of columns; a metric is the variant's number plus
    a tenth of the seed."""
    rows = [
        {"variant": variant, "beta": 0.0, "seed": seed, **dict(zip(columns, place, strict=True))}
        | dict.fromkeys(METRICS, value + seed / 10)
        for (variant, value), seed in itertools.product(variants.items(), SEEDS)
        for place in itertools.product(*columns.values())
    ]
    return pd.DataFrame(rows)


def over_beta() -> pd.DataFrame:
    """Every KL term at three betas: a larger beta, a smaller KL."""
    rows = []
    for variant, beta, seed in itertools.product(figures.KL_TERMS, (1.0, 0.1, 0.3), range(4)):
        if variant == "none" and beta < 1.0:
            continue
        kl = (0.05 + 0.01 * seed) / beta
        rows.append((variant, 0.0 if variant == "none" else beta, seed, kl, 0.5 - 0.1 * np.log(kl)))
    return pd.DataFrame(rows, columns=["variant", "beta", "seed", "reverse_kl", "accuracy"])


def costs():
    rows = [("supervised", 0.5, 1.0, 0.8, 1.2, 0), ("supervised", 0.6, 1.5, 1.1, 2.0, 2)]
    spent = pd.DataFrame(rows, columns=["other", "threshold", "mean", "low", "high", "missed"])
    called = {"supervised": "SFT"}
    return ch18_distillation.costs({"a": spent, "b": spent}, called, claimed=(7.0, 10.0))


def cheap_and_dear():
    drawn = table({"exact_loss": 0.2, ch17_stale.LARGE_BATCH: 0.4}, update=[0, 5])
    rate = drawn["variant"].map({"exact_loss": 1000, ch17_stale.LARGE_BATCH: 4000})
    cost = rate * (drawn["update"] + 5)
    return ch17_stale.at_cost(drawn.assign(completions=cost, passes=10 * cost))


def decoding():
    budgets = ch17_stale.decoding_steps(recorded("partial_rollouts"))
    return ch17_stale.decoding(table(dict.fromkeys(budgets, 0.3), update=[0, 10]), budgets)


def two_dots():
    return figures.dots(table({"a": 0.1, "b": 0.5}), {"b": "B", "a": "A"}, {"accuracy": "x"})


def test_lines_are_means_over_seeds_in_the_middle_of_their_windows():
    curves = table({"a": 0.1, "b": 0.4, "c": 0.7}, update=[0, 20, 40])
    panels = {"one": {"a": "A", "b": "B"}, "two": {"c": "B", "a": "C"}}
    first, second = figures.training_curves(curves, panels, "accuracy", "accuracy").axes
    lines = {line.get_label(): line for line in first.get_lines() if line.get_label() in "AB"}
    assert list(lines["A"].get_xdata()) == [10.0, 30.0, 50.0]
    np.testing.assert_allclose(lines["B"].get_ydata(), 0.4 + 0.25)
    alike = {line.get_label(): line.get_color() for line in second.get_lines()}
    assert alike["B"] == lines["B"].get_color() != lines["A"].get_color() != alike["C"]
    band = first.collections[0].get_paths()[0].vertices[:, 1]
    low, high = interval(0.1 + np.arange(6) / 10)[1:]
    assert (band.min(), band.max()) == pytest.approx((low, high))


def test_dots_are_means_in_the_order_of_their_labels():
    (axes,) = two_dots().axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["B", "A"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first label is on top"
    points = next(line for line in axes.get_lines() if line.get_marker() == "o")
    np.testing.assert_allclose(points.get_xdata(), [0.75, 0.35])


def test_a_front_runs_through_the_points_of_its_betas():
    panel = figures.fronts(over_beta()).axes[0]
    k2 = next(c for c in panel.containers if c.get_label() == "$k_2$").lines[0]
    np.testing.assert_allclose(np.asarray(k2.get_xdata(), float), [0.65, 0.65 / 3, 0.065])
    assert panel.get_xscale() == "log"


def test_costs_mark_what_is_only_a_bound():
    first = costs().axes[0]
    drawn = {
        marker: [
            y
            for line in first.get_lines()
            if line.get_marker() == marker
            for y in np.asarray(line.get_ydata(), float)
        ]
        for marker in "o^"
    }
    assert drawn == {"o": [1.0], "^": [1.5]}


def test_costs_are_drawn_to_half_as_much_again_as_the_cheapest():
    ends = [panel.get_xlim()[1] for panel in cheap_and_dear().axes]
    assert ends == pytest.approx([15.0, 150.0])


def test_decoding_steps_scale_the_updates_of_each_variant():
    budgets = ch17_stale.decoding_steps(recorded("partial_rollouts"))
    ends = [[line.get_xdata()[-1] for line in panel.get_lines()] for panel in decoding().axes]
    assert ends == [[10] * 5, [10 * budgets[name] for name in ch17_stale.BUDGETS]]
