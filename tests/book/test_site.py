"""The built book as files: no broken link or anchor, every image described, nothing remote."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from analysis.report.site import site_problems


def test_no_link_anchor_image_or_resource_is_broken(html: Path) -> None:
    assert site_problems(html) == []


def test_remote_links_name_files_of_the_repository(html: Path) -> None:
    pages = sorted((html / "book/_run").glob("*.html"))
    assert pages
    for page in pages:
        remote = re.findall(r'href="(https://[^"]+)"', page.read_text(encoding="utf-8"))
        assert [url for url in remote if "_run/" in url or "_generated/" in url] == []
        here = [url for url in remote if f"notebooks/{page.stem}.ipynb" in url]
        hosts = {urlsplit(url).hostname for url in here}
        assert hosts == {"github.com", "colab.research.google.com", "mybinder.org"}, page.name


def test_mathjax_is_carried_along_and_small(html: Path) -> None:
    files = [path for path in (html / "_static/mathjax").rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    assert any(path.suffix == ".js" for path in files)
    assert any(path.suffix == ".woff" for path in files)
    assert size < 3e6, f"{size} bytes of MathJax"
