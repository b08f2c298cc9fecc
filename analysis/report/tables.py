"""Tables for pages: frames of rounded text, so that a page and its test see the same characters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from analysis.report.numbers import format_value


def as_text(
    frame: pd.DataFrame,
    columns: Mapping[str, tuple[str, str]],
    *,
    index: int = 1,
    missing: str = "–",
) -> pd.DataFrame:
    """Rounded, renamed and ordered columns of a tidy frame, ready to show.

    Args:
        frame: tidy results.
        columns: for each column to show, its heading and its number format (``""`` for text).
        index: how many leading columns head the rows.
        missing: what a NaN shows as.

    Returns:
        A frame of strings.
    """
    text = pd.DataFrame(
        {
            heading: [
                missing if pd.isna(value) else format_value(name, value, spec)
                for value in frame[name]
            ]
            for name, (heading, spec) in columns.items()
        }
    )
    return text.set_index(list(text.columns[:index]))


def as_markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of a Markdown page."""
    lines = [header, ("---",) * len(header), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )
