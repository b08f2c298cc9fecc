"""Tables for pages: frames of rounded text, so that a page and its test see the same characters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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


#: What metrics are called in tables.
METRICS = {
    "accuracy": "accuracy",
    "own_accuracy": "accuracy",
    "average": "accuracy, mean over training",
    "reverse_kl": "reverse KL (nats)",
    "forward_kl": "forward KL (nats)",
    "teacher_kl": "KL to the teacher (nats)",
    "entropy": "entropy (nats)",
    "length": "length (tokens)",
    "own_length": "length (tokens)",
    "wrong_length": "wrong answers (tokens)",
    "excess": "wrong less right (tokens)",
    "used_fraction": "share of tokens used",
    "gradient_norm": "gradient norm",
    "fluctuation of gradient_norm": "fluctuation of the gradient norm",
    "fluctuation of reverse_kl": "fluctuation of the reverse KL",
}


def with_interval(row: Mapping[str, Any], spec: str) -> str:
    """A mean and its interval in one piece of text: ``+0.12 (+0.05 to +0.19)``."""
    mean, low, high = (format_value(name, row[name], spec) for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def differences(
    table: pd.DataFrame, names: Mapping[str, str], *, spec: str = "+.3f", **extra: str
) -> pd.DataFrame:
    """Judged comparisons as readers meet them: names, difference, interval and verdict.

    ``extra`` are further columns of the table -> their heading; they come first.
    """
    called = {name: names.get(name, name) for name in {*table["variant"], *table["other"]}}
    text = table.assign(
        compared=table["variant"].map(called) + ", less " + table["other"].map(called),
        between=[
            f"{format_value('low', low, spec)} to {format_value('high', high, spec)}"
            if low == low
            else "–"
            for low, high in zip(table["low"], table["high"], strict=True)
        ],
    )
    columns = {name: (heading, "") for name, heading in extra.items()}
    columns["compared"] = ("variants", "")
    if "metric" in table:
        text["metric"] = [METRICS.get(name, name) for name in text["metric"]]
        columns["metric"] = ("of", "")
    columns |= {"mean": ("difference", spec), "between": ("95% interval", "")}
    columns["verdict"] = ("verdict", "")
    return as_text(text, columns, index=len(extra) + 1 + ("metric" in table))


def as_markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of a Markdown page."""
    lines = [header, ("---",) * len(header), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )
