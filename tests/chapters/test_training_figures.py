"""Figures of the trained chapters: their points are means of the given runs."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from analysis.evidence import training_figures as figures
from analysis.evidence.forest import forest
from analysis.records.statistics import interval
from kl_term import style

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


def two_dots():
    return figures.dots(table({"b": 0.5, "a": 0.1}), {"a": "A", "b": "B"}, {"accuracy": "x"})


def test_dots_are_means_in_the_order_of_their_table():
    (axes,) = two_dots().axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["B", "A"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first variant is on top"
    points = next(line for line in axes.get_lines() if line.get_marker() == "o")
    np.testing.assert_allclose(points.get_xdata(), [0.75, 0.35])


def test_a_band_is_the_interval_over_the_seeds_around_their_mean():
    _, axes = style.subplots()
    look = style.line("k2")
    figures.bands(axes, table({"a": 0.1, "b": 0.4}, update=[0, 20]), "accuracy", {"a": look})
    (line,) = axes.get_lines()
    np.testing.assert_allclose(line.get_ydata(), 0.1 + 0.25)
    edge = axes.collections[0].get_paths()[0].vertices[:, 1]
    low, high = interval(0.1 + np.arange(6) / 10)[1:]
    assert (edge.min(), edge.max()) == pytest.approx((low, high))


def test_a_trade_off_runs_through_the_points_of_its_betas():
    panel = figures.trade_offs(over_beta()).axes[0]
    k2 = next(c for c in panel.containers if c.get_label() == "$k_2$").lines[0]
    np.testing.assert_allclose(np.asarray(k2.get_xdata(), float), [0.65, 0.65 / 3, 0.065])
    assert panel.get_xscale() == "log"


def test_a_forest_tells_what_held_from_what_is_open_or_refuted():
    ends = {"mean": [0.1, -0.2, 0.0], "low": [0.05, -0.4, -0.1], "high": [0.2, -0.1, 0.1]}
    table = pd.DataFrame(ends | {"outcome": ["holds", "open", "refuted"]})
    (axes,) = forest(table, ["a", "b\n− c", "d"], "difference", margin=0.03).axes
    points = [line for line in axes.get_lines() if line.get_marker() not in ("None", "")]
    assert [line.get_xdata().item() for line in points] == ends["mean"]
    assert [(line.get_marker(), line.get_markerfacecolor() != "white") for line in points] == [
        ("o", True),
        ("o", False),
        ("X", True),
    ]
    bottom, top = axes.get_ylim()
    assert bottom > top, "the first row is at the top"
    (band,) = axes.patches
    assert (band.get_x(), band.get_x() + band.get_width()) == (-0.03, 0.03)
