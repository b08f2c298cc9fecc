"""Author and year as the label of a work, the same on every page and in the bibliography.

Works that would print the same label get a letter behind the year, in the order of the
bibliography: *Liu et al., 2025a*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from string import ascii_lowercase
from typing import Any

from pybtex.database import Entry
from pybtex.plugin import find_plugin, register_plugin
from pybtex.style.formatting.plain import Style as PlainStyle
from pybtex.style.labels import BaseLabelStyle
from pybtex.style.sorting import BaseSortingStyle
from sphinx.application import Sphinx
from sphinxcontrib.bibtex.style.referencing.author_year import AuthorYearReferenceStyle

_REFERENCE_STYLE = AuthorYearReferenceStyle()  # what ``{cite}`` prints


def label(entry: Entry) -> str:
    """What the book prints for a work: its authors as on the pages, and its year."""
    authors = _REFERENCE_STYLE.person.author_or_editor_or_title(full=False)
    names = authors.format_data({"entry": entry, "style": _REFERENCE_STYLE})
    return f"{names}, {entry.fields['year']}"


def tell_apart(entries: Iterable[Entry]) -> None:
    """Put a letter behind the year of works that would print the same label."""
    ordered = sorted(entries, key=lambda entry: (label(entry), entry.fields["title"]))
    for _, group in groupby(ordered, key=label):
        works = list(group)
        if len(works) > 1:
            for work, letter in zip(works, ascii_lowercase, strict=False):
                work.fields["year"] += letter


class _Labels(BaseLabelStyle):
    def format_labels(self, sorted_entries: Iterable[Entry]) -> Iterator[str]:
        return map(label, sorted_entries)


class _ByLabel(BaseSortingStyle):
    def sorting_key(self, entry: Entry) -> str:
        return label(entry).casefold()


class AuthorYearStyle(PlainStyle):
    """The plain style, in the order of the labels that the pages print."""

    default_label_style = _Labels
    default_sorting_style = _ByLabel


def setup(app: Sphinx) -> dict[str, Any]:
    """Make ``bibtex_default_style: author_year`` known and labels unique (called by Sphinx)."""
    register_plugin("pybtex.style.formatting", "author_year", AuthorYearStyle)
    for name in ("plaintext", "docutils"):  # else each citation looks through all packages for them
        register_plugin("pybtex.backends", name, find_plugin("pybtex.backends", name), force=True)
    app.connect("builder-inited", _tell_apart, priority=900)  # after the entries were read
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _tell_apart(app: Sphinx) -> None:
    tell_apart(app.env.get_domain("cite").bibdata.data.entries.values())
