"""What a page is about, in a reader's words, as entries of the index.

A Sphinx extension. ``book/index_terms.yaml`` names the terms of each page; they stand in the index
and the search ranks them above every text that only contains them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.logging import getLogger

from analysis.report.strict_yaml import load_yaml

FILE = "book/index_terms.yaml"
_LOG = getLogger(__name__)


def read_terms(path: Path) -> dict[str, list[str]]:
    """The terms of each page, by the page's name below ``book/``.

    Raises:
        ValueError: a page has no list of words, or a term stands on two pages.
    """
    terms = load_yaml(path, path.name)
    homes: dict[str, str] = {}
    for page, listed in terms.items():
        if not isinstance(listed, list) or not all(isinstance(term, str) for term in listed):
            raise ValueError(f"{path.name}: {page}: give a list of terms")
        for term in listed:
            if term in homes:
                raise ValueError(f"{path.name}: {term!r} stands at {homes[term]} and at {page}")
            homes[term] = page
    return terms


class AddTerms(SphinxTransform):
    """Index the terms of a page at its title, before the index domain collects them."""

    default_priority = 800

    def apply(self, **_: Any) -> None:
        terms = self.app.kl_terms.get(self.env.docname.removeprefix("book/"))
        section = next(iter(self.document.findall(nodes.section)), None)
        if terms and section is not None:
            target = section["ids"][0]
            entries = [("single", term, target, "main", None) for term in terms]
            section.insert(1, addnodes.index(entries=entries))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx)."""
    app.connect("builder-inited", _read)
    app.connect("env-updated", _check)
    app.add_transform(AddTerms)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _read(app: Sphinx) -> None:
    path = Path(app.srcdir) / FILE
    app.kl_terms = read_terms(path) if path.is_file() else {}


def _check(app: Sphinx, env: Any) -> None:
    for page in app.kl_terms:
        if f"book/{page}" not in env.found_docs:
            _LOG.warning("%s: there is no page %s", FILE, page)
