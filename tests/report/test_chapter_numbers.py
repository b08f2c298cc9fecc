"""Chapters have the numbers of their notebooks, in whatever order the menu has them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from docutils.utils import new_document
from sphinx.errors import ExtensionError

from analysis.report import chapter_numbers
from analysis.report.pages import toc_pages
from analysis.report.project import Project
from tests.report.sites import build_site

ROOT = Path(__file__).resolve().parents[2]
PAGE = """\
{title}
=======

.. figure:: x.png
   :name: fig-{name}

   Drawn.

A
-

B
-

.. prf:theorem:: It is
   :label: thm-{name}

   So.
"""
INDEX = """\
Book
====

See :prf:ref:`thm-late`, :prf:ref:`thm-early` and :numref:`fig-late`.
"""


def site(root: Path, *pages: str) -> str:
    root.mkdir(exist_ok=True)
    (root / "x.png").write_bytes(
        (ROOT / "book/_static/figures/fig-gradient-drift.png").read_bytes()
    )
    (root / "index.rst").write_text(INDEX)
    for page in pages:
        name = page.partition("_")[2] or page
        (root / f"{page}.rst").write_text(PAGE.format(title=name.title(), name=name))
    part = {"caption": "Part", "chapters": [{"file": page} for page in pages]}
    toc = {"format": "jb-book", "root": "index", "parts": [part]}
    (root / "_toc.yml").write_text(yaml.safe_dump(toc))
    extensions = ["sphinx_external_toc", "sphinx_proof", "analysis.report.chapter_numbers"]
    return build_site(
        root, extensions=extensions, numfig=True, numfig_secnum_depth=1, html_theme="basic"
    )


def numbers(page: Path) -> list[str]:
    """The numbers of the page's headings; its menu has those of other pages."""
    return re.findall(r'<h\d><span class="section-number">([\d.]+)', page.read_text())


def test_a_chapter_its_sections_its_figures_and_theorems_have_the_number_of_its_file(
    tmp_path: Path,
) -> None:
    assert site(tmp_path, "22_late", "plain", "03_early", "00_first") == ""
    built = tmp_path / "out"
    assert numbers(built / "22_late.html") == ["22.", "22.1.", "22.2."]
    assert numbers(built / "00_first.html") == ["0.", "0.1.", "0.2."]
    assert numbers(built / "plain.html") == []
    said = re.sub(r"<[^>]+>", "", (built / "index.html").read_text())
    assert "See Theorem 22.1, Theorem 3.1 and Fig. 22.1." in said


def test_two_chapters_of_one_number_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExtensionError, match="03_early and 03_late: both are chapter 3"):
        site(tmp_path, "03_late", "03_early")


def test_a_chapter_of_two_titles_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "PAGE", "One\n===\n\nTwo\n===\n")
    with pytest.raises(ExtensionError, match="03_late: a chapter has one title"):
        site(tmp_path, "03_late")


def test_latex_counts_from_the_same_number() -> None:
    for kind, page, parts in (
        ("latex", "book/_run/22_late", 2),
        ("latex", "book/answer", 0),
        ("html", "book/_run/22_late", 0),
    ):
        app = SimpleNamespace(
            builder=SimpleNamespace(format=kind), env=SimpleNamespace(docname=page)
        )
        document = new_document("")
        chapter_numbers.number_on_paper(app, document)
        assert len(document.children) == parts
        if parts:
            assert r"\setcounter{chapter}{21}" in document.children[0].astext()


def test_every_notebook_is_one_chapter_of_the_menu() -> None:
    pages = [page.name for page in toc_pages(Project(ROOT)) if page.parent.name == "_run"]
    assert sorted(pages) == sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    moved = yaml.safe_load((ROOT / "_config.yml").read_text())["sphinx"]["config"]["moved_pages"]
    found = [chapter_numbers.chapter_of(page) for page in [*pages, *moved]]
    assert sorted(found) == list(range(len(found))), "a number is free where a chapter was merged"
