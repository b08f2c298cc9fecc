"""The distillation figures draw the numbers they are given."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.report.figures import distillation as figures


@pytest.fixture
def table() -> pd.DataFrame:
    rows = [
        ("reverse_exact", 0.5, 2.0, 1.5, 3.0, 0),
        ("reverse_exact", 0.6, 4.0, 3.0, 5.0, 2),
        ("supervised", 0.5, 1.0, 0.8, 1.2, 0),
        ("supervised", 0.6, 1.5, 1.1, 2.0, 2),
    ]
    columns = ["other", "threshold", "mean", "low", "high", "missed"]
    return pd.DataFrame(rows, columns=columns)


def ys(line) -> list[float]:
    return [float(y) for y in line.get_ydata()]


def test_costs_show_every_ratio_and_mark_the_bounds(table):
    others = {"reverse_exact": "exact", "supervised": "SFT"}
    figure = figures.costs({"a": table, "b": table.assign(missed=0)}, others, claimed=(7, 10))
    first, second = figure.axes
    assert {"o": {2.0, 1.0}, "^": {4.0, 1.5}} == {
        marker: {y for line in first.get_lines() if line.get_marker() == marker for y in ys(line)}
        for marker in "o^"
    }
    assert not any(len(ys(line)) for line in second.get_lines() if line.get_marker() == "^")
    assert [tick.get_text() for tick in first.get_xticklabels()] == ["0.5", "0.6"]
    assert first.get_yscale() == second.get_yscale() == "log"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["exact", "SFT"]


def test_tradeoff_puts_arms_at_their_interquartile_means():
    finals = pd.DataFrame(
        {"arm": arm, "beta": 0.0, "seed": seed, "own_length": length + seed, "own_accuracy": right}
        for arm, length, right in (("grpo", 5.0, 0.4), ("dpo", 3.0, 0.6))
        for seed in range(4)
    )
    figure = figures.tradeoff(finals, {"grpo": "GRPO", "dpo": "DPO"}, {"start": (6.0, 0.3)})
    (axes,) = figure.axes
    drawn = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.get_lines()}
    # seeds add 0 to 3, of which the middle two count
    assert {(6.5, 0.4), (4.5, 0.6), (6.0, 0.3)} <= drawn
    with pytest.raises(KeyError):
        figures.tradeoff(finals, {"unknown": "?"}, {})


def test_a_level_is_drawn_and_named_in_each_panel(table):
    others = {"supervised": "SFT"}
    figure = figures.costs({"a": table, "b": table}, others, claimed=(7, 10))
    figures.with_level(figure, 0.7, "teacher")
    for panel in figure.axes:
        assert [0.7, 0.7] in [list(line.get_ydata()) for line in panel.get_lines()]
        assert "teacher" in [text.get_text() for text in panel.texts]
