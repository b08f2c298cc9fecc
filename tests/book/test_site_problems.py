"""The static check of the built site: whole sites pass, and each fault is named with its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.book.site_problems import site_problems

OTHER = '<html><body><h1 id="top">B</h1></body></html>'
WHOLE = """
<html><head><link rel="stylesheet" href="s.css">
<link rel="canonical" href="https://example.org/"></head>
<body><p id="here">text</p><a href="#here">a</a><a href="sub/b.html#top">b</a><a href="sub/">c</a>
<a href="https://example.org/x.html#y">out</a><a href="mailto:a@example.org">mail</a>
<a href="#">up</a><img src="f%20g.png" alt="Lines that cross">
<img src="data:image/png;base64,AA" alt="A dot"></body></html>
"""


def site(root: Path, page: str) -> Path:
    root = root.resolve()
    (root / "sub").mkdir()
    (root / "sub/b.html").write_text(OTHER)
    (root / "sub/index.html").write_text(OTHER)
    (root / "_static").mkdir()
    (root / "_static/template.html").write_text('<a href="{{ not a page }}">x</a>')
    (root / "s.css").write_text("")
    (root / "f g.png").write_bytes(b"")
    (root / "a.html").write_text(page)
    return root


def test_a_whole_site_has_no_problems(tmp_path: Path) -> None:
    assert site_problems(site(tmp_path, WHOLE)) == []


@pytest.mark.parametrize(
    ("markup", "complaint"),
    [
        ('<a href="sub/c.html">x</a>', "link to sub/c.html, which does not exist"),
        ('<a href="sub/b.html#end">x</a>', "whose page has no anchor 'end'"),
        ('<a href="#nowhere">x</a>', "whose page has no anchor 'nowhere'"),
        ('<img src="no.png" alt="Two lines">', "link to no.png, which does not exist"),
        ('<script src="https://example.org/x.js"></script>', "loads https://example.org/x.js"),
        ('<script src="//example.org/x.js"></script>', "loads //example.org/x.js from a network"),
        ('<link rel="stylesheet" href="https://example.org/f.css">', "from a network"),
        ('<img src="f%20g.png">', "needs a description, not alt=''"),
        ('<img src="f%20g.png" alt="Alt text">', "needs a description"),
        ('<img src="f%20g.png" alt="../_images/f g.png">', "needs a description"),
        ('<img src="f%20g.png" alt="_images/fig">', "needs a description"),
    ],
)
def test_each_fault_is_named_with_its_page(tmp_path: Path, markup: str, complaint: str) -> None:
    (problem,) = site_problems(site(tmp_path, WHOLE + markup))
    assert problem.startswith("a.html: ")
    assert complaint in problem


def test_a_folder_without_pages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no built page; run make book"):
        site_problems(tmp_path)
