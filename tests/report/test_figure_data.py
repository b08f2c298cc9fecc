"""The table beside a figure has the numbers that were drawn, and nothing else."""

from __future__ import annotations

import io

import pandas as pd
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.figure import Figure

from analysis.report.figure_data import KEY, WORDS, figure_data, figure_words, show_with_data


def read(figure: Figure) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(figure_data(figure)), dtype={"panel": str})


def test_lines_points_bands_bars_and_grids_are_read_and_guides_are_not() -> None:
    figure = Figure()
    left, right, under = figure.subplots(1, 3)
    left.set_title("left")
    left.plot([1, 2], [0.25, 1 / 3], label="a")
    left.axhline(7.0)
    left.axvline(8.0)
    left.fill_between([1, 2], [0, 1], [2, 5], label="b")
    right.scatter([3], [4], label="c")
    right.barh([0, 1], [2.5, -1.0], label="d")
    under.pcolormesh([0, 1, 2], [0, 1], [[5.0, 6.0]])
    table = read(figure).fillna({"series": ""})
    kinds = dict(list(table.groupby("kind")))
    assert set(kinds) == {"line", "points", "band", "bar", "cell"}
    assert kinds["line"][["panel", "series", "x", "y"]].to_numpy().tolist() == [
        ["left", "a", 1.0, 0.25],
        ["left", "a", 2.0, 0.333333],
    ]
    assert {(1.0, 0.0), (2.0, 5.0)} <= set(zip(kinds["band"]["x"], kinds["band"]["y"], strict=True))
    assert kinds["points"][["panel", "x", "y"]].to_numpy().tolist() == [["2", 3.0, 4.0]]
    assert kinds["bar"][["x", "low", "high"]].to_numpy().tolist() == [[0, 0, 2.5], [1, -1, 0]]
    assert kinds["cell"][["x", "y", "low"]].to_numpy().tolist() == [[0.5, 0.5, 5], [1.5, 0.5, 6]]


def test_a_figure_without_data_has_no_table() -> None:
    figure = Figure()
    figure.subplots().axhline(1.0)
    assert figure_data(figure) == ""


def test_words_are_read_once_each_and_formulas_and_numbers_are_not() -> None:
    figure = Figure()
    axes = figure.subplots()
    axes.set_title("reward")
    axes.set_xlabel("KL\n(nats)")
    axes.set_ylabel("reward")
    axes.plot([1, 2], [3, 4], label="$k_1$ in the reward")
    axes.plot([1, 2], [4, 5], label=r"$\log \pi$")
    axes.text(1, 3, "hidden words", visible=False)
    axes.legend()
    assert sorted(figure_words(figure)) == ["$k_1$ in the reward", "KL (nats)", "reward"]


def test_the_table_travels_with_the_image() -> None:
    shell = InteractiveShell()
    show_with_data(shell)
    figure = Figure(figsize=(2, 1), dpi=50)
    axes = figure.subplots()
    axes.plot([1, 2], [3, 4])
    axes.set_title("reward")
    data, metadata = shell.display_formatter.format(figure)
    assert data["image/png"]
    assert metadata["image/png"]["width"] == 100
    assert metadata["image/png"][KEY] == figure_data(figure)
    assert metadata["image/png"][WORDS] == ["reward"]
