"""The comparisons of a page of recorded runs, judged together: a page that asks many questions
finds some differences by chance.

A chapter's ``compare()`` returns its tables by name; :func:`judged_page` judges them by the number
of comparisons that the whole page makes, and :func:`check_verdicts` holds the prose to the outcome.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pandas as pd

from analysis.experiments import summaries

#: Columns that tell the rows of a table apart, as far as it has them.
KEYS = ("variant", "other", "metric")

#: A verdict -> the rows that have it: name of the table, then variant, other variant, metric.
Verdicts = Mapping[str, Iterable[tuple[str, ...]]]


def pairs(spelled: str, *metrics: str) -> list[tuple[str, ...]]:
    """``"k2/none k3/k2"``: each variant beside the other, with each of the metrics in turn."""
    found = [tuple(pair.split("/")) for pair in spelled.split()]
    return [(*pair, metric) for metric in metrics for pair in found] if metrics else found


def rows(table: str, spelled: str, *metrics: str) -> list[tuple[str, ...]]:
    """The keys of :func:`pairs` in a table of the page, as :data:`Verdicts` name them."""
    return [(table, *pair) for pair in pairs(spelled, *metrics)]


class Page(NamedTuple):
    """All comparisons of one page."""

    tables: dict[str, pd.DataFrame]  #: with ``verdict`` and ``differs``, by name
    counts: dict[str, int]  #: of :func:`analysis.experiments.summaries.tally`

    def row(self, table: str, *key: str) -> pd.Series:
        """One comparison: its variant, other variant and, where there is one, metric."""
        (found,) = [row for _, row in self.tables[table].iterrows() if key_of(row) == key]
        return found

    def whole(self) -> pd.DataFrame:
        """Every comparison in one table, that of its own named in ``part``."""
        named = (table.assign(part=name.replace("_", " ")) for name, table in self.tables.items())
        return pd.concat(named, ignore_index=True)

    def rows(self) -> Iterable[tuple[tuple[str, ...], pd.Series]]:
        """Every comparison with its key: the table's name, then :func:`key_of`."""
        for name, table in self.tables.items():
            for _, row in table.iterrows():
                yield (name, *key_of(row)), row


def key_of(row: pd.Series) -> tuple[str, ...]:
    """What names a comparison within its table."""
    return tuple(row[name] for name in KEYS if name in row)


def judged_page(tables: Mapping[str, pd.DataFrame], comparisons: int) -> Page:
    """Judge all tables of a page together, by name.

    Raises:
        ValueError: it makes another number of ``comparisons`` than it says.
    """
    counts = summaries.tally(tables.values(), comparisons)
    judged = {name: summaries.judged(table, comparisons) for name, table in tables.items()}
    return Page(judged, counts)


def check_verdicts(page: Page, says: Verdicts) -> None:
    """Refuse a page whose prose says another verdict than its recordings give.

    Raises:
        ValueError: names each row that has another verdict, or that the page does not have.
    """
    found = {key: row["verdict"] for key, row in page.rows()}
    wrong = [
        f"{', '.join(key)}: {found.get(key, 'is not compared')}, the text says {verdict}"
        for verdict, keys in says.items()
        for key in keys
        if found.get(key) != verdict
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
