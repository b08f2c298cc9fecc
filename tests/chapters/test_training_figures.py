"""Figures of the trained chapters: each draws, and its points are means of the given runs."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from analysis import style
from analysis.chapters import (
    ch04_grpo,
    ch11_numerics,
    ch15_full_vocabulary,
    ch17_stale,
    ch18_distillation,
    ch19_equal_kl,
    ch20_language_model,
)
from analysis.chapters import training_figures as figures
from analysis.chapters.ch17_routing import ROUTINGS
from analysis.chapters.claims import recorded
from analysis.experiments.language import estimator_tail
from analysis.experiments.statistics import interval
from analysis.experiments.summaries import paired_along

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


def aged() -> pd.DataFrame:
    return table({f"{n}_lag_{lag}": 0.1 + lag / 100 for n in ch17_stale.LOSSES for lag in (0, 16)})


def differences():
    pairs = [(variant, "exact_loss") for variant in ("k2_loss", "k3_loss")]
    found = paired_along(over_beta(), pairs, of="reverse_kl", metric="accuracy")
    return ch19_equal_kl.differences(found.assign(level="all"), "the exact KL")


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


def routings():
    drawn = table(dict.fromkeys(ROUTINGS, 0.5), update=[0, 1], noise=[0.0, 0.3])
    return ch17_stale.routings(drawn.rename(columns={"variant": "routing", "accuracy": "reward"}))


def decoding():
    budgets = ch17_stale.decoding_steps(recorded("partial_rollouts"))
    return ch17_stale.decoding(table(dict.fromkeys(budgets, 0.3), update=[0, 10]), budgets)


def numerics():
    errors = ch11_numerics.error_curves(ch11_numerics.small_log_ratios(count=50), bins=3)
    return ch11_numerics.cancellation(errors)


def vocabulary_noise():
    shape = {"width": 3, "exponent": 1.0, "sharpness": 1.0, "drift": 0.5, "seed": 4}
    found = ch15_full_vocabulary.noise_table([8, 64], states=6, **shape).assign(drift=0.5)
    return ch15_full_vocabulary.noise(found)


def two_dots():
    return figures.dots(table({"a": 0.1, "b": 0.5}), {"b": "B", "a": "A"}, {"accuracy": "x"})


def weak_teacher():
    drawn = figures.training_curves(
        recorded("weak_teacher").curves, {"a": {"grpo": "GRPO"}}, "own_accuracy", "accuracy"
    )
    return ch18_distillation.with_level(drawn, 0.5, "teacher")


FIGURES = {
    "04 accuracy": lambda: ch04_grpo.training(recorded("full").curves, "accuracy", "accuracy"),
    "04 KL": lambda: ch04_grpo.training(recorded("full").curves, "reverse_kl", "KL, log scale"),
    "11 cancellation": numerics,
    "11 clamps": lambda: ch11_numerics.clamps(-6.0, 6.0),
    "15 cost": lambda: ch15_full_vocabulary.benchmark(ch15_full_vocabulary.recorded()),
    "15 noise": vocabulary_noise,
    "16 dots": lambda: figures.dots(
        table({"a": 0.1, "b": 0.5}), {"b": "B", "a": "A"}, {"accuracy": "x"}
    ),
    "16 metrics": lambda: figures.metrics_over_training(
        table({"a": 0.1, "b": 0.5}, update=[0, 10]), {"a": "A"}, {"entropy": "nats"}
    ),
    "17 ages": lambda: ch17_stale.ages(aged()),
    "17 peaks": lambda: ch17_stale.peaks(aged(), 16),
    "17 ways": lambda: ch17_stale.ways(table(dict.fromkeys(ch17_stale.WAYS, 0.3))),
    "17 cost": cheap_and_dear,
    "17 masks": lambda: ch17_stale.masks(recorded("stale_masking").finals),
    "17 mismatch": lambda: ch17_stale.mismatches(recorded("mismatch").finals),
    "17 routing": routings,
    "17 decoding": decoding,
    "18 costs": costs,
    "18 teacher": weak_teacher,
    "18 trade-off": lambda: ch18_distillation.tradeoff(
        recorded("kdrl").finals, {"grpo": "GRPO"}, {"start": (6.0, 0.3)}
    ),
    "19 fronts": lambda: figures.fronts(over_beta()),
    "19 differences": differences,
    "20 beside": lambda: ch20_language_model.beside_figure(
        ch20_language_model.beside({"a": recorded("full").finals}, "reverse_kl", beta=0.3), "KL"
    ),
    "20 readings": lambda: ch20_language_model.readings_figure(
        ch20_language_model.readings(recorded("smollm2_short").curves)
    ),
    "20 rare tokens": lambda: ch20_language_model.seen_figure(
        ch20_language_model.seen(estimator_tail.recorded()["none"].tail), 1000.0
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_draws_without_a_warning(name):
    figure = FIGURES[name]()
    assert len(style.png(figure)) > 5000
    assert all(axes.has_data() for axes in figure.axes)


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
