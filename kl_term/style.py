"""The visual language of the book: one colour, marker and label per estimator, on every page.

Figures are drawn on their own white card (see ``book/_static/custom.css``), so that the same PNG is
legible on light and dark pages. The palette keeps at least 3:1 contrast on white and stays apart
under protanopia, deuteranopia and tritanopia; ``tests/report/test_style.py`` measures both.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, get_args

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import Colormap, LogNorm, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from PIL import Image

from kl_term.kl.names import Estimator
from kl_term.plain_checks import check_choice

_LOOKS: dict[str, tuple[str, str, str]] = {
    "none": ("#9A9088", "x", "no KL term"),
    "k1": ("#A13405", "o", "$k_1$"),
    "k2": ("#226BCB", "s", "$k_2$"),
    "k3": ("#065C44", "^", "$k_3$"),
    "k3_clip": ("#289CCB", "v", "$k_3$ clipped"),
    "k4": ("#5FA253", "<", "$k_4$"),
    "minimax01": ("#A24089", "P", "MiniMax-01"),
    "exact": ("#111111", "*", "exact"),
    "reverse": ("#230B62", "D", "reverse KL"),
    "forward": ("#AA9112", "X", "forward KL"),
    "cross_entropy": ("#4B1E00", "h", "cross-entropy"),
}


def with_spare_looks(names: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """The looks of estimators: one without a look of its own gets the next spare one."""
    unknown = [name for name in names if name not in _LOOKS]
    spare = zip(unknown, cycle(("#8700FF", "#F02DFF")), cycle((">", "p", "d")), strict=False)
    return _LOOKS | {name: (colour, marker, name) for name, colour, marker in spare}


COLOURS, MARKERS, LABELS = (
    {name: look[part] for name, look in with_spare_looks(get_args(Estimator)).items()}
    for part in range(3)
)

LINESTYLES: dict[str, str] = {"loss": "-", "reward": "--"}
"""Placement of the KL term: solid in the loss, dashed in the reward."""

WIDTH = 6.0
"""Width of every figure, inches: 600 CSS pixels at 100 dpi, so that text survives a phone."""

QUIET = "#5A5A5A"
"""Of axes, guides and remarks that are no data."""

SERIES = (
    {"color": "#111111", "marker": "o", "linestyle": "-"},
    {"color": "#A4570A", "marker": "s", "linestyle": "--"},
    {"color": "#3D7A3E", "marker": "^", "linestyle": "-."},
    {"color": "#7A4FA3", "marker": "D", "linestyle": ":"},
    {"color": "#B03060", "marker": "v", "linestyle": (0, (6, 2, 1, 2))},
)
"""A colour, a marker and a line for each of a few things that are no estimators."""

_INK = "#1A1A1A"
_GRID = "#E4E4E4"

RC: dict[str, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": "figure",
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",
    "mathtext.fontset": "dejavusans",
    "font.size": 12.5,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 12.5,
    "xtick.labelsize": 11.5,
    "ytick.labelsize": 11.5,
    "legend.fontsize": 11.5,
    "legend.frameon": False,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": QUIET,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": True,
    "lines.linewidth": 2.2,
    "lines.markersize": 7,
    "errorbar.capsize": 3,
}


def use() -> None:
    """Make this style matplotlib's current one, whatever a user's ``matplotlibrc`` says."""
    matplotlib.rcParams.update({**matplotlib.rcParamsDefault, "backend": "agg", **RC})


def subplots(
    rows: int = 1, columns: int = 1, *, height: float = 3.7, **options: Any
) -> tuple[Figure, Any]:
    """A figure of the house width and its axes.

    Args:
        rows: rows of axes.
        columns: columns of axes; at most two stay readable on a phone.
        height: height of the whole figure, inches.
        options: passed to :meth:`matplotlib.figure.Figure.subplots` (``sharex``, ``sharey``, ...).

    Returns:
        The figure, and one ``Axes`` or an array of them.
    """
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(WIDTH, height))
        return figure, figure.subplots(rows, columns, **options)


def line(name: str, placement: str = "loss", **changes: Any) -> dict[str, Any]:
    """Keyword arguments for ``Axes.plot``: colour, marker, line style and label of one variant.

    Args:
        name, placement: of the KL term.
        changes: options that stand instead, such as ``marker=""``.

    Raises:
        ValueError: unknown ``name`` or ``placement``.
    """
    check_choice("name", name, COLOURS)
    check_choice("placement", placement, LINESTYLES)
    return {
        "color": COLOURS[name],
        "marker": MARKERS[name],
        "linestyle": LINESTYLES[placement],
        "label": LABELS[name],
        **changes,
    }


def text_colour(colour: str) -> str:
    """A darker shade of ``colour``, with the 4.5:1 contrast that text needs on white."""
    return to_hex(tuple(0.75 * channel for channel in to_rgb(colour)))


def note(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    *,
    offset: tuple[float, float] = (0, 0),
    colour: str | None = None,
    **options: Any,
) -> None:
    """Write a text beside a point: on the side to which ``offset`` goes.

    >>> note(axes, "printed", (10_000, 2.4), offset=(8, -6))  # right of the point, and below it

    Args:
        text: what is written.
        at: the point, in data unless ``xycoords`` says otherwise.
        offset: from the point, in typographic points.
        colour: of what the text is about, or an estimator's name; darkened for text.
        options: of :meth:`matplotlib.axes.Axes.annotate` (``xycoords``, ``ha``, ``va``, ...).
    """
    right, up = offset
    above = "center" if up == 0 else "bottom" if up > 0 else "top"
    options = {"ha": "right" if right < 0 else "left", "va": above} | options
    if colour is not None:
        options["color"] = text_colour(COLOURS.get(colour, colour))
    axes.annotate(text, at, xytext=offset, textcoords="offset points", **options)


def guide(axes: Axes, *, x: float | None = None, y: float | None = None, **look: Any) -> None:
    """A thin dotted line through all of the axes at ``x`` or ``y``: a mark that is no data."""
    look = {"color": QUIET, "linewidth": 1, "linestyle": ":"} | look
    if x is not None:
        axes.axvline(x, **look)
    if y is not None:
        axes.axhline(y, **look)


def plain_numbers(*scales: Axis) -> None:
    """Write the ticks of logarithmic scales as plain numbers, and nothing between them."""
    for scale in scales:
        scale.set_major_formatter("{x:g}")
        scale.set_minor_formatter(NullFormatter())


def band(
    axes: Axes,
    table: Any,
    x: str,
    *,
    middle: str = "median",
    low: str = "p10",
    high: str = "p90",
    **look: Any,
) -> None:
    """A line through one column of a table, with a band between two others around it.

    Args:
        table, x: the table, and its column along the axis.
        middle, low, high: columns of the line and of the band's edges.
        look: of the line (``Axes.plot``); the band has its ``color``.
    """
    axes.fill_between(
        table[x], table[low], table[high], color=look["color"], alpha=0.15, linewidth=0
    )
    axes.plot(table[x], table[middle], **look)


#: For :func:`lines`: both scales logarithmic, and a band from the 10th to the 90th percentile.
LOG_LOG = {"xscale": "log", "yscale": "log"}
P10_TO_P90 = {"band_of": ("p10", "p90")}


def lines(
    table: Any,
    x: str,
    y: str = "median",
    *,
    kind: str | list[str],
    looks: Mapping[Any, Mapping[str, Any]],
    xlabel: str,
    ylabel: str,
    panel: str = "",
    titles: Mapping[Any, str] | None = None,
    band_of: tuple[str, str] | None = None,
    legend: str = "",
    height: float = 3.9,
    **options: Any,
) -> Figure:
    """Lines over ``x``, one a kind, in one panel or in several side by side.

    Args:
        table, x, y: a row a point, and the columns along the axes.
        kind: the column, or columns, that tell the lines apart.
        looks: what is drawn, in this order: kind -> options of ``Axes.plot``, with a label.
        xlabel, ylabel: of the figure.
        panel, titles: the column that tells the panels apart, and its values -> their titles.
        band_of: columns between which a band lies around each line, such as p10 and p90.
        legend: where the first panel has a legend; by default labels stand at the line ends.
        height: inches.
        options: of :meth:`matplotlib.axes.Axes.set`, for every panel.
    """
    titles = titles or {"": ""}
    figure, panels = subplots(1, len(titles), sharey=True, squeeze=False, height=height)
    for axes, (value, title) in zip(panels.flat, titles.items(), strict=True):
        curves = dict(iter((table[table[panel] == value] if panel else table).groupby(kind)))
        for name in (name for name in looks if name in curves):
            if band_of:
                low, high = band_of
                band(axes, curves[name], x, middle=y, low=low, high=high, **looks[name])
            else:
                axes.plot(curves[name][x], curves[name][y], **looks[name])
        axes.set(title=title, **options)
    panels.flat[0].set_ylabel(ylabel)
    if panel:
        figure.supxlabel(xlabel, fontsize="medium")
    else:
        panels.flat[0].set_xlabel(xlabel)
    if legend:
        panels.flat[0].legend(loc=legend)
    else:
        label_line_ends(panels.flat[-1])
    return figure


def lollipops(table: Any, label: str, columns: Mapping[str, str], *, colour: str) -> Figure:
    """A row of the table each, as a dot at the end of a line from zero.

    Args:
        table, label: a row a dot, and the column that names them.
        columns: the columns drawn, a panel each -> the label of its axis.
        colour: of the dots.
    """
    figure, panels = subplots(1, len(columns), sharey=True, height=3.9)
    rows = range(len(table))[::-1]
    for axes, (column, title) in zip(panels, columns.items(), strict=True):
        axes.hlines(rows, 0, table[column], color="#B9B9B9", linewidth=2)
        axes.plot(table[column], rows, linestyle="none", marker="o", color=colour)
        axes.set(xlim=(min(0, table[column].min()) - 0.03, 1.1 * table[column].max()), xlabel=title)
        axes.grid(False, axis="y")
    panels[0].set_yticks(rows, table[label])
    return figure


def ratio_mesh(
    axes: Axes, x: Any, y: Any, ratio: Any, *, decades: int, cmap: str | Colormap, label: str
) -> None:
    """A ratio over two axes in the colours of a diverging map, whose middle is a ratio of one.

    Args:
        x, y: [M] and [N].
        ratio: [N, M], positive; NaN is left white.
        decades: the ratio's powers of ten that the colours tell apart, on either side.
        cmap: the colours.
        label: of their bar, whose scale is logarithmic.
    """
    axes.grid(visible=False)
    norm = LogNorm(10.0**-decades, 10.0**decades)
    mesh = axes.pcolormesh(x, y, ratio, cmap=cmap, norm=norm, shading="nearest", rasterized=True)
    axes.figure.colorbar(mesh, ax=axes, extend="both", pad=0.02, label=label)


def label_line_ends(axes: Axes) -> None:
    """Write each line's label at its right end, in its colour, apart from its neighbours.

    Call it last: it reads the axis limits and freezes them. Lines without a label are left alone.
    """
    lines = [ln for ln in axes.get_lines() if not str(ln.get_label()).startswith("_")]
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    to_fraction = axes.transData + axes.transAxes.inverted()
    ends = [_last_finite(ln.get_xdata(), ln.get_ydata()) for ln in lines]
    heights = [float(to_fraction.transform(end)[1]) for end in ends]
    box = axes.get_position()
    inches = box.height * axes.figure.get_size_inches()[1]
    gap = 1.25 * RC["legend.fontsize"] / 72 / inches
    for ln, height in zip(lines, spread(heights, gap), strict=True):
        axes.annotate(
            str(ln.get_label()),
            xy=(1.02, height),
            xycoords="axes fraction",
            color=text_colour(to_hex(ln.get_color())),
            fontsize=RC["legend.fontsize"],
            va="center",
            annotation_clip=False,
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """The nearest heights, in least squares and in the same order, that are ``gap`` apart.

    Subtracting ``rank * gap`` turns the constraint into "not decreasing", which pooling adjacent
    violators solves exactly.
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    pools: list[tuple[float, int]] = []
    for rank, i in enumerate(order):
        mean, size = min(max(heights[i], 0.0), 1.0) - rank * gap, 1
        while pools and pools[-1][0] > mean:
            left, count = pools.pop()
            mean, size = (left * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    flat = [mean for mean, size in pools for _ in range(size)]
    placed = [0.0] * len(heights)
    for rank, i in enumerate(order):
        placed[i] = flat[rank] + rank * gap
    return placed


def bars(rows: Any, middle: str = "mean") -> np.ndarray:
    """Error bars as matplotlib wants them: lengths below and above the middle, [2, rows].

    Rounding may not make one negative.

    Args:
        rows: a table, or one row of it, with columns ``low`` and ``high``.
        middle: the column of the middle.
    """
    below, above = rows[middle] - rows["low"], rows["high"] - rows[middle]
    return np.stack([np.atleast_1d(below), np.atleast_1d(above)]).clip(min=0.0)


def png(figure: Figure) -> bytes:
    """The figure as a PNG at twice its nominal resolution; equal figures give equal bytes.

    In 256 colours, which the eye does not tell from all of them and which takes a third of the
    space.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=2 * figure.dpi, metadata={"Software": None})
    image = Image.open(drawn).convert("RGB")
    written = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(written, format="png", optimize=True)
    return written.getvalue()


def _last_finite(x: Any, y: Any) -> tuple[float, float]:
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    finite = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    if not finite.size:
        raise ValueError("label_line_ends: a labelled line has no finite point")
    return float(x[finite[-1]]), float(y[finite[-1]])
