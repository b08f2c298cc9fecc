"""The visual language: complete, unique, visible on white, and apart under colour blindness."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from kl_term import style

#: Of every estimator that has a look of its own, and the two spare ones.
LOOKS = style.with_spare_looks(["cubic", "quartic"])
NAMES = list(LOOKS)

# Machado, Oliveira & Fernandes (2009), severity 1, acting on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)


def linear(colour: str | np.ndarray) -> np.ndarray:
    rgb = np.array(to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def cielab(rgb: np.ndarray) -> np.ndarray:
    xyz = XYZ @ np.clip(rgb, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast_on_white(colour: str) -> float:
    return 1.05 / (float(XYZ[1] @ linear(colour)) + 0.05)


def test_every_name_has_its_own_colour_marker_and_label() -> None:
    for part, table in enumerate((style.COLOURS, style.MARKERS, style.LABELS)):
        assert len({look[part] for look in LOOKS.values()}) == len(NAMES)
        own = {name: look[part] for name, look in LOOKS.items() if name in table}
        assert own.items() <= table.items()


@pytest.mark.parametrize("name", NAMES)
def test_lines_and_their_labels_are_visible_on_the_white_card(name: str) -> None:
    assert contrast_on_white(LOOKS[name][0]) >= 3.0
    assert contrast_on_white(style.text_colour(LOOKS[name][0])) >= 4.5


@pytest.mark.parametrize("vision", VISION)
def test_no_two_colours_are_confused(vision: str) -> None:
    seen = {name: cielab(VISION[vision] @ linear(LOOKS[name][0])) for name in NAMES}
    nearest = min(
        (float(np.linalg.norm(seen[a] - seen[b])), a, b)
        for a, b in itertools.combinations(NAMES, 2)
    )
    assert nearest[0] >= 15, nearest


def test_line_carries_the_placement_in_its_style() -> None:
    assert style.line("k3", "reward") == {
        "color": style.COLOURS["k3"],
        "marker": style.MARKERS["k3"],
        "linestyle": "--",
        "label": "$k_3$",
    }


@pytest.mark.parametrize(("name", "placement"), [("cubic", "loss"), ("k3", "bonus")])
def test_unknown_variant_is_refused(name: str, placement: str) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        style.line(name, placement)


@pytest.mark.parametrize(
    ("offset", "ha", "va"),
    [((8, -6), "left", "top"), ((-6, 0), "right", "center"), ((0, 6), "left", "bottom")],
)
def test_a_note_stands_on_the_side_of_its_offset(offset, ha: str, va: str) -> None:
    axes = style.subplots()[1]
    style.note(axes, "here", (2.0, 3.0), offset=offset, colour="k3")
    (text,) = axes.texts
    assert (text.xy, text.get_ha(), text.get_va()) == ((2.0, 3.0), ha, va)
    assert text.get_color() == style.text_colour(style.COLOURS["k3"])


def test_a_band_lies_between_its_columns_and_its_line_on_the_middle() -> None:
    axes = style.subplots()[1]
    rows = {"x": [0.0, 1.0], "median": [2.0, 3.0], "p10": [1.0, 2.0], "p90": [4.0, 5.0]}
    style.band(axes, rows, "x", **style.line("k1"))
    assert list(axes.get_lines()[0].get_ydata()) == rows["median"]
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert set(heights) == {*rows["p10"], *rows["p90"]}


def test_lines_carry_the_data_of_their_labels_in_the_panel_of_their_title() -> None:
    rows = [(p, k, x, x * p * k, 0.0, 9.0) for p in (1, 2) for k in (3, 5) for x in (1.0, 2.0)]
    table = pd.DataFrame(rows, columns=["panel", "kind", "x", "median", "p10", "p90"])
    figure = style.lines(
        table,
        "x",
        kind="kind",
        looks={5: style.line("k1"), 3: style.line("k2"), 7: style.line("k3")},
        panel="panel",
        titles={2: "two", 1: "one"},
        band_of=("p10", "p90"),
        xlabel="x",
        ylabel="y",
    )
    drawn = {
        (axes.get_title(loc="left") or axes.get_title(), line.get_label()): list(line.get_ydata())
        for axes in figure.axes
        for line in axes.get_lines()
    }
    assert drawn["two", style.LABELS["k1"]] == [10.0, 20.0]
    assert drawn["one", style.LABELS["k2"]] == [3.0, 6.0]
    assert len(drawn) == 4


def test_dots_end_where_their_row_says() -> None:
    table = pd.DataFrame({"name": ["a", "b"], "bias": [0.5, 2.0], "noise": [3.0, 1.0]})
    figure = style.lollipops(table, "name", {"bias": "bias", "noise": "noise"}, colour="#111111")
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["a", "b"]
    dots = [list(axes.get_lines()[0].get_xdata()) for axes in figure.axes]
    assert dots == [[0.5, 2.0], [3.0, 1.0]]


def test_a_ratio_of_one_has_the_middle_of_the_colours() -> None:
    axes = style.subplots()[1]
    ratio = np.array([[1.0, 100.0], [0.01, 1e9]])
    style.ratio_mesh(axes, [0, 1], [0, 1], ratio, decades=2, cmap="PuOr", label="ratio")
    (mesh,) = axes.collections
    np.testing.assert_allclose(mesh.norm(ratio).ravel()[:3], [0.5, 1.0, 0.0], atol=1e-12)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_labels_are_spread_in_order_and_apart(heights: list[float]) -> None:
    placed = style.spread(heights, 0.1)
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    gaps = np.diff([placed[i] for i in order])
    assert (gaps >= 0.1 - 1e-9).all()


def test_two_crowded_labels_move_equally_to_both_sides() -> None:
    assert style.spread([0.5, 0.5], 0.2) == pytest.approx([0.4, 0.6])


def figure_of_two_lines():
    figure, axes = style.subplots()
    axes.plot([0, 1, 2], [1.0, 2.0, np.nan], **style.line("k1"))
    axes.plot([0, 1, 2], [1.0, 1.5, 2.0], **style.line("k3", "reward"))
    axes.plot([0, 2], [1.2, 1.2], color="grey")
    style.label_line_ends(axes)
    return figure


def test_labels_stand_at_the_last_finite_point_of_labelled_lines_only() -> None:
    axes = figure_of_two_lines().axes[0]
    assert [text.get_text() for text in axes.texts] == ["$k_1$", "$k_3$"]


def test_png_is_at_twice_the_resolution_and_equal_for_equal_figures() -> None:
    first, second = style.png(figure_of_two_lines()), style.png(figure_of_two_lines())
    assert first == second
    assert int.from_bytes(first[16:20], "big") == round(2 * 100 * style.WIDTH)
    assert b"Software" not in first


def test_figures_are_made_in_house_style_and_unknown_to_pyplot() -> None:
    import matplotlib.pyplot as plt

    figure, axes = style.subplots(1, 2, height=3, sharey=True)
    assert figure.get_size_inches() == pytest.approx([style.WIDTH, 3])
    assert not axes[0].spines["top"].get_visible()
    assert plt.get_fignums() == []
