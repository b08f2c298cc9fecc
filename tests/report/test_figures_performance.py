from __future__ import annotations

import pytest

from analysis.experiments.benchmark import measure, recorded
from analysis.report.figures import performance


@pytest.fixture(scope="module")
def benchmark():
    return recorded.load().benchmark


def test_the_times_drawn_are_the_medians(benchmark):
    figure = performance.time_over_members(benchmark)
    table = measure.medians(benchmark)
    assert len(figure.axes) == len(benchmark.config.widths)
    for panel, width in zip(figure.axes, sorted(benchmark.config.widths), strict=True):
        alone = table[(table["width"] == width) & (table["processes"] == 1)]
        expected = alone[alone["kind"] == "population"].sort_values("members")
        lines = [
            line for line in panel.lines if list(line.get_xdata()) == list(expected["members"])
        ]
        assert list(lines[0].get_ydata()) == list(expected["ms"])
        fastest = measure.best(table, "plain", width)["ms"]
        assert any(set(line.get_ydata()) == {fastest} for line in panel.lines)


def test_the_bars_fill_the_whole(benchmark):
    (axes,) = performance.phases(benchmark).axes
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert max(ends) == pytest.approx(100.0, abs=0.01)
