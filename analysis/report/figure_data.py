"""The numbers that a figure draws, as a table beside its image, and the words in it.

A figure's lines, bands, points and bars carry their data. They are read from the figure when a
notebook shows it, travel in the metadata of its image, and the site offers them below the figure.
So do its words, which an edition in another language explains there.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection, QuadMesh
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text

from kl_term import style

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

#: The keys of the table and of the words in the metadata of an image.
KEY, WORDS = "data", "words"
COLUMNS = ("panel", "kind", "series", "x", "y", "low", "high")
_FORMULA, _WORD = re.compile(r"\$[^$]*\$"), re.compile(r"[A-Za-z]{2}")


def figure_data(figure: Figure) -> str:
    """What a figure draws as CSV, six digits a number; empty where it draws no data.

    A row is a point of a ``line``, of ``points``, a vertex of a ``band`` (its outline, in order), a
    ``bar`` (its middle, with both ends) or a ``cell`` of a coloured grid. Guides that span a panel
    are left out.
    """
    rows = [
        (_panel(axes, number), *row)
        for number, axes in enumerate(figure.axes, start=1)
        for row in _drawn(axes)
    ]
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_written(value) for value in row] for row in rows)
    return text.getvalue()


def figure_words(figure: Figure) -> list[str]:
    """What is written in a figure in words, once each: titles, labels, legends, remarks."""
    shown = (text for text in figure.findobj(Text) if text.get_visible())
    said = (" ".join(text.get_text().split()) for text in shown)
    return list(dict.fromkeys(text for text in said if _WORD.search(_FORMULA.sub("", text))))


def show_with_data(shell: InteractiveShell) -> None:
    """Let a notebook show figures by :func:`kl_term.style.png`, with size, data and words."""

    def shown(figure: Figure) -> tuple[bytes, dict[str, Any]]:
        image = style.png(figure)
        width, height = (round(side * figure.dpi) for side in figure.get_size_inches())
        beside = {KEY: figure_data(figure), WORDS: figure_words(figure)}
        found = {key: value for key, value in beside.items() if value}
        return image, {"width": width, "height": height} | found

    shell.display_formatter.formatters["image/png"].for_type(Figure, shown)


def _panel(axes: Axes, number: int) -> str:
    return axes.get_title() or axes.get_title(loc="left") or str(number)


def _drawn(axes: Axes) -> Iterator[tuple[Any, ...]]:
    for line in axes.lines:
        x, y = np.asarray(line.get_xdata(), object), np.asarray(line.get_ydata(), object)
        if line.get_transform() is axes.transData:  # else a guide
            yield from (("line", _name(line), *point) for point in zip(x, y, strict=True))
    for container in axes.containers:
        if isinstance(container, BarContainer):
            for bar in container.patches:
                x, y, width, height = bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()
                flat = container.orientation == "horizontal"
                ends = (y + height / 2, x, x + width) if flat else (x + width / 2, y, y + height)
                yield "bar", _name(container), ends[0], "", min(ends[1:]), max(ends[1:])
    for part in axes.collections:
        if isinstance(part, PathCollection):
            yield from (("points", _name(part), *point) for point in np.asarray(part.get_offsets()))
        elif isinstance(part, QuadMesh):
            corners = np.asarray(part.get_coordinates())
            middles = (corners[:-1, :-1] + corners[1:, 1:]) / 2
            values = np.ma.filled(part.get_array(), np.nan).reshape(middles.shape[:2])
            for middle, value in zip(middles.reshape(-1, 2), values.ravel(), strict=True):
                yield "cell", _name(part), *middle, value, value
        elif isinstance(part, PolyCollection):
            for path in part.get_paths():
                yield from (("band", _name(part), *vertex) for vertex in path.vertices[:-1])


def _name(artist: Any) -> str:
    """The label of an artist; matplotlib begins those it made up with an underscore."""
    label = str(artist.get_label())
    return "" if label.startswith("_") else label


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{float(value):.6g}" if isinstance(value, (int, float, np.number)) else str(value)
