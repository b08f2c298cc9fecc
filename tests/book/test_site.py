"""The built book as files: no broken link or anchor, every image described, nothing remote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from analysis.report.address import load_address
from analysis.report.project import Project
from tests.book.site_problems import book_pages, site_problems

ROOT = Path(__file__).resolve().parents[2]


def test_no_link_anchor_image_or_resource_is_broken(html: Path) -> None:
    assert site_problems(html) == []


def test_pages_link_to_no_repository_but_serve_their_notebooks(html: Path) -> None:
    """address.yaml is empty: a link to a repository would lead nowhere."""
    if load_address(Project(ROOT)).repository:
        pytest.skip("the project has an address")
    for page in book_pages(html / "book"):
        text = page.read_text(encoding="utf-8")
        assert "kl-term/kl-term" not in text
        assert "colab.research" not in text and "mybinder" not in text
        if page.parent.name == "_run":
            assert f"_sources/book/_run/{page.stem}.ipynb" in text


def test_old_addresses_lead_to_pages(html: Path) -> None:
    pages = set(book_pages(html / "book"))
    leading = set((html / "book").rglob("*.html")) - pages
    assert {path.stem for path in leading} >= {
        "09_advantages",
        "11_numerics",
        "17_stale_and_mismatched",
        "19_equal_kl",
    }
    for path in leading:
        (target,) = re.findall(r'location.replace\("([^"]+)"', path.read_text())
        assert (path.parent / target).resolve() in pages


def test_the_reference_serves_the_source_of_the_functions(html: Path) -> None:
    assert 'id="kl_term.kl.estimators.k3"' in (html / "book/_generated/api_kl.html").read_text()
    assert "expm1" in (html / "_modules/kl_term/kl/estimators.html").read_text()
    assert "kl_term.kl.estimators.k3" in (html / "genindex.html").read_text()


def test_pages_say_what_they_are_about(html: Path) -> None:
    for page in book_pages(html / "book/_run"):
        assert re.search(r'<meta name="description" content="[^"]{60,}', page.read_text()), (
            page.name
        )


def test_only_the_icons_that_pages_show_are_carried_along(html: Path) -> None:
    assert (html / "_static/scripts/fontawesome.js").stat().st_size < 20_000


def test_mathjax_is_carried_along_and_small(html: Path) -> None:
    files = [path for path in (html / "_static/mathjax").rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    assert any(path.suffix == ".js" for path in files)
    assert any(path.suffix == ".woff" for path in files)
    assert size < 3e6, f"{size} bytes of MathJax"


def test_no_page_is_heavy(html: Path) -> None:
    """Pages stay readable on a phone: text below 300 kB, with its images below 1.5 MB."""
    heavy = []
    for page in book_pages(html / "book"):
        text = page.read_text(encoding="utf-8")
        text = re.sub(r'<img[^>]+-dark\.png"', "", text)  # one of the two versions is fetched
        sources = {(page.parent / s).resolve() for s in re.findall(r'<img[^>]+src="([^"]+)"', text)}
        images = sum(path.stat().st_size for path in sources if path.is_file())
        size = page.stat().st_size
        if size > 300_000 or size + images > 1_500_000:
            heavy.append(f"{page.relative_to(html)}: {size} bytes, {images} of images")
    assert heavy == []


def test_figures_of_runs_offer_their_data(html: Path) -> None:
    page = (html / "book/_run/02_gradients.html").read_text()
    links = re.findall(r'class="kl-data" href="([^"]+\.csv)"', page)
    assert len(links) >= 2
    for link in links:
        text = (html / "book/_run" / link).resolve().read_text()
        assert text.startswith("panel,kind,series,x,y,low,high\n")
        assert text.count("\n") > 5


def test_chinese_pages_say_what_the_words_in_figures_mean(html: Path) -> None:
    page = (html / "zh/book/_run/22_proxy_rewards.html").read_text()
    assert page.count('<details class="kl-words">') >= 5
    assert "<em>proxy</em>：代理奖励" in page
    assert "kl-words" not in (html / "book/_run/22_proxy_rewards.html").read_text()


def test_tables_and_formulas_that_a_cell_shows_are_set(html: Path) -> None:
    for name in ("20_language_model", "22_proxy_rewards"):
        page = (html / f"book/_run/{name}.html").read_text()
        assert not re.findall(r"<p>(?:\||[^<]*\$k_1\$).*", page)
    assert re.search(r"<td><p>[^<]*␣\d+[^<]*⏎", page)  # what a model said


def test_the_site_has_a_card(html: Path) -> None:
    assert (html / "_static/card.png").is_file()
    landing = (html / "book/index.html").read_text()
    assert 'property="og:image" content="../_static/card.png"' in landing
