"""What the site offers beside its pages, and the index that the search ranks first."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from analysis.report.index_terms import FILE, read_terms
from analysis.report.pages import toc_pages
from analysis.report.project import Project
from analysis.report.site_files import card, sitemap
from kl_term import style
from tests.report.sites import build_site

ROOT = Path(__file__).resolve().parents[2]


def test_the_sitemap_has_whole_addresses() -> None:
    tree = ElementTree.fromstring(sitemap("https://example.org/b/", ["book/a&b.html"]).encode())
    assert [place.text for place in tree.iter() if place.tag.endswith("loc")] == [
        "https://example.org/b/book/a&b.html"
    ]


def test_the_card_has_the_size_that_others_expect() -> None:
    image = style.png(card())
    width, height = (int.from_bytes(image[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (1200, 630)


def test_chapters_are_in_the_index() -> None:
    terms = read_terms(ROOT / FILE)
    pages = {path.relative_to(ROOT / "book").as_posix() for path in toc_pages(Project(ROOT))}
    assert terms.keys() <= pages
    assert len(terms.keys() & {page for page in pages if page.startswith("_run/")}) >= 20


def test_a_term_on_two_pages_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index_terms.yaml"
    path.write_text("a: [one, two]\nb: [two]\n")
    with pytest.raises(ValueError, match="'two' stands at a and at b"):
        read_terms(path)


def test_terms_stand_in_the_index_of_the_search(tmp_path: Path) -> None:
    (tmp_path / "book").mkdir()
    (tmp_path / "book/index.rst").write_text("A title\n=======\n\nText.\n")
    (tmp_path / FILE).write_text("index: [Appendix D]\n")
    build_site(tmp_path, extensions=["analysis.report.index_terms"], root_doc="book/index")
    written = (tmp_path / "out/searchindex.js").read_text()
    index = json.loads(re.fullmatch(r"Search\.setIndex\((.*)\)", written)[1])
    assert index["indexentries"] == {"appendix d": [[0, "a-title", True]]}
