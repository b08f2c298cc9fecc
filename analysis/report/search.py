"""What the search needs when the book is built: words of Chinese, and pages without its index.

A Sphinx extension. Chinese has no spaces: a run of characters becomes its pairs, here and in
``book/_static/search.js``, which splits what a reader types. That script loads the index when
somebody searches, so that no other page carries it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import snowballstemmer
from sphinx.application import Sphinx
from sphinx.search.zh import SearchChinese

_HAN = r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+"
_WORD = re.compile(rf"{_HAN}|(?:(?!{_HAN})\w)+")
_INDEX = re.compile(r'\s*<script src="[^"]*searchindex\.js"[^>]*></script>')


def pairs(text: str) -> list[str]:
    """The words of a text: Latin ones, and each pair of neighbouring Chinese characters."""
    found = []
    for word in _WORD.findall(text):
        chinese = re.match(_HAN, word) and len(word) > 1
        found += [word[i : i + 2] for i in range(len(word) - 1)] if chinese else [word]
    return found


class ChinesePairs(SearchChinese):
    """Chinese without a dictionary."""

    lang = "zh_CN"
    language_name = "Chinese"

    def init(self, options: dict[str, str]) -> None:
        """Load no dictionary of words; the stemmer is that of the page's script."""
        self.stemmer = snowballstemmer.stemmer("porter")

    def split(self, input: str) -> list[str]:
        """The words to index."""
        return pairs(input)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx)."""
    app.add_search_language(ChinesePairs)
    app.connect("build-finished", drop_index)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def drop_index(app: Sphinx, failure: Exception | None) -> None:
    """Take the index of the search out of every page; ``search.js`` loads it."""
    if failure is not None or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        if (without := _INDEX.sub("", text)) != text:
            page.write_text(without, encoding="utf-8")
