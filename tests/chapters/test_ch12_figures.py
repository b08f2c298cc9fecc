from __future__ import annotations

import pytest

from analysis.chapters import ch12_performance as chapter


@pytest.fixture(scope="module")
def benchmark():
    return chapter.load()


def test_the_times_drawn_are_the_medians(benchmark):
    figure = chapter.time_over_runs(benchmark)
    table = chapter.medians(benchmark)
    assert len(figure.axes) == len((32, 64))
    for panel, width in zip(figure.axes, (32, 64), strict=True):
        alone = table[(table["width"] == width) & (table["processes"] == 1)]
        expected = alone[alone["kind"] == "population"].sort_values("runs")
        lines = [line for line in panel.lines if list(line.get_xdata()) == list(expected["runs"])]
        assert list(lines[0].get_ydata()) == list(expected["ms"])
        fastest = chapter.best(table, "plain", width)["ms"]
        assert any(set(line.get_ydata()) == {fastest} for line in panel.lines)


def test_the_bars_fill_the_whole(benchmark):
    (axes,) = chapter.phases(benchmark).axes
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert max(ends) == pytest.approx(100.0, abs=0.01)
