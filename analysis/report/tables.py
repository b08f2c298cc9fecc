"""Tables for pages: frames of rounded text, so that a page and its test see the same characters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import pandas as pd
from IPython.display import Markdown

from kl_term.numbers import format_value, with_interval

if TYPE_CHECKING:
    from analysis.records.preset import Preset


def as_text(
    frame: pd.DataFrame,
    columns: Mapping[str, tuple[str, str]],
    *,
    index: int = 1,
) -> pd.DataFrame:
    """Rounded, renamed and ordered columns of a tidy frame, ready to show.

    Args:
        columns: for each column to show, its heading and its number format (``""`` for text).
        index: how many leading columns head the rows.
    """
    text = pd.DataFrame(
        {
            heading: [
                "–" if pd.isna(value) else format_value(name, value, spec) for value in frame[name]
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
    "final_reward": "reward, fresh answers",
    "final_accuracy": "accuracy, fresh answers",
    "final_reverse_kl": "reverse KL, fresh answers (nats)",
    "gradient_norm": "gradient norm",
    "fluctuation of gradient_norm": "fluctuation of the gradient norm",
    "fluctuation of reverse_kl": "fluctuation of the reverse KL",
}


def differences(
    table: pd.DataFrame, names: Mapping[str, str], *, spec: str = "+.3f", **extra: str
) -> pd.DataFrame:
    """Judged comparisons as readers meet them: names, difference, interval and verdict.

    A metric that all share stands in the heading of the difference. ``extra`` are further columns
    of the table -> their heading; they come first.
    """
    called = {name: names.get(name, name) for name in {*table["variant"], *table["other"]}}
    text = table.assign(
        compared=table["variant"].map(called) + " − " + table["other"].map(called),
        between=[
            f"{format_value('low', low, spec)} to {format_value('high', high, spec)}"
            if low == low
            else "–"
            for low, high in zip(table["low"], table["high"], strict=True)
        ],
    )
    columns = {name: (heading, "") for name, heading in extra.items()}
    columns["compared"] = ("variants", "")
    difference = "difference"
    if "metric" in table:
        text["metric"] = [METRICS.get(name, name) for name in text["metric"]]
        columns["metric"] = ("measured", "")
        if text["metric"].nunique() == 1:
            difference += f" in {text['metric'].iloc[0]}"
            del columns["metric"]
    index = len(columns)
    columns |= {"mean": (difference, spec), "between": ("95% interval", "")}
    columns["verdict"] = ("verdict", "")
    return as_text(text, columns, index=index)


def predicted(judged: pd.DataFrame, **extra: str) -> pd.DataFrame:
    """Judged predictions (:func:`analysis.evidence.predictions.shown`) as readers meet them.

    ``extra`` are further columns of the table -> their heading; they come first. What was not
    predicted has no ``expected`` and no ``outcome``.
    """
    named = {
        "reverse_kl": "reverse KL, ratio",
        "final_reverse_kl": "reverse KL, fresh answers, ratio",
        "k3": "k3, as logged",
        "length": "tokens",
        "teacher_kl": "KL to the teacher, ratio",
        "log_peak_gradient": "largest gradient norm, ratio",
    }
    found = [
        with_interval(row, row["spec"]) if row["mean"] == row["mean"] else "–"
        for row in judged.to_dict("records")
    ]
    columns = {
        "compared": ("variants", ""),
        "metric": ("measured", ""),
        "at": ("at", ""),
        "expected": ("predicted", ""),
        "found": ("found, 95% interval", ""),
        "outcome": ("outcome", ""),
    }
    if judged["at"].nunique() == 1:
        del columns["at"]
    columns = {name: said for name, said in columns.items() if name in judged or name == "found"}
    text = judged.assign(found=found, metric=judged["metric"].replace(METRICS | named))
    extras = {name: (heading, "") for name, heading in extra.items()}
    return as_text(text, extras | columns, index=len(extra) + 2 + ("at" in columns))


def pilots(presets: Iterable[Preset]) -> pd.DataFrame:
    """What was tried before each design was written, and what was chosen from it."""
    rows = [
        {"preset": f"`{preset.name}`"} | pilot.model_dump()
        for preset in presets
        for pilot in preset.design.pilots
    ]
    headings = {"preset": "recorded runs", "tried": "tried", "runs": "runs", "seen": "seen"}
    columns = {name: (heading, "") for name, heading in (headings | {"chosen": "chosen"}).items()}
    return as_text(pd.DataFrame(rows), columns, index=1)


def predictions(said: Mapping[str, Iterable[str]]) -> Markdown:
    """What was predicted before the runs: name of the recording -> its sentences."""
    lists = ("\n".join(f"1. {text}" for text in texts) for texts in said.values())
    return Markdown(
        "\n\n".join(f"**{name}**\n\n{texts}" for name, texts in zip(said, lists, strict=True))
    )
