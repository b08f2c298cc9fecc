"""What a page is about, in a reader's words, as entries of the index.

A Sphinx extension. ``book/index_terms.yaml`` names the terms of each page, or of a section of it
(``page#label``), ``book/symptoms.yaml`` those of each symptom, and
``book/locale/zh_CN/index_terms.yaml`` the Chinese ones of the edition in Chinese. They stand in the
index, and the search ranks them above every text that only contains them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.logging import getLogger

from analysis.report.project import Project
from analysis.report.strict_yaml import load_yaml
from analysis.report.symptoms import FILE as SYMPTOMS
from analysis.report.symptoms import index_terms
from analysis.report.translation import CODE

FILE = "book/index_terms.yaml"
CHINESE = f"book/locale/{CODE}/index_terms.yaml"
_LOG = getLogger(__name__)


def read_terms(path: Path) -> dict[str, list[str]]:
    """The terms of each page, by the page's name below ``book/``.

    Raises:
        ValueError: a page has no list of words, or a term stands on two pages.
    """
    terms = load_yaml(path, path.name)
    check_terms(terms, path.name)
    return terms


def check_terms(terms: dict[str, list[str]], name: str) -> None:
    """Refuse a page without a list of words, and a term that stands twice.

    Raises:
        ValueError: which page, or which term.
    """
    homes: dict[str, str] = {}
    for page, listed in terms.items():
        if not isinstance(listed, list) or not all(isinstance(term, str) for term in listed):
            raise ValueError(f"{name}: {page}: give a list of terms")
        for term in listed:
            if term in homes:
                raise ValueError(f"{name}: {term!r} stands at {homes[term]} and at {page}")
            homes[term] = page


def all_terms(project: Project, *, chinese: bool = False) -> dict[str, list[str]]:
    """Every term of an edition, by the page or by the section of a page that it stands for."""
    files = [FILE, CHINESE] if chinese else [FILE]
    told = (project.book / SYMPTOMS).is_file()
    found: dict[str, list[str]] = index_terms(project, chinese=chinese) if told else {}
    for file in files:
        for place, terms in read_terms(project.root / file).items():
            found.setdefault(place, []).extend(terms)
    check_terms(found, "terms of the index")
    return found


class AddTerms(SphinxTransform):
    """Index the terms of a page at its title, before the index domain collects them."""

    default_priority = 800

    def apply(self, **_: Any) -> None:
        for place, terms in self.app.kl_terms.items():
            page, _, label = place.partition("#")
            if page != self.env.docname.removeprefix("book/"):
                continue
            sections = list(self.document.findall(nodes.section))
            at = next((s for s in sections if label in s["ids"]), None) if label else sections[0]
            if at is None:
                _LOG.warning("terms of the index: %s has no section %s", page, label)
                continue
            target = at["ids"][0]  # that of its heading
            entries = [("single", term, target, "main", None) for term in terms]
            at.insert(1, addnodes.index(entries=entries))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx)."""
    app.connect("builder-inited", _read)
    app.connect("env-updated", _check)
    app.add_transform(AddTerms)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _read(app: Sphinx) -> None:
    root = Path(app.srcdir)
    chinese = app.config.language == CODE
    app.kl_terms = all_terms(Project(root), chinese=chinese) if (root / FILE).is_file() else {}


def _check(app: Sphinx, env: Any) -> None:
    for place in app.kl_terms:
        if f"book/{place.partition('#')[0]}" not in env.found_docs:
            _LOG.warning("%s: there is no page %s", FILE, place)
