"""The directive ``{explore}``: a page has the scripts of its explorers and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.sites import build_site


def site(root: Path, **pages: str) -> str:
    scripts = root / "book/_static/explore"
    scripts.mkdir(parents=True)
    for name in ("math", "draw", "seek", "values"):
        (scripts / f"{name}.js").write_text("")
    (scripts / "explore.css").write_text("")
    listed = "\n".join(f"   {name}" for name in pages)
    (root / "index.rst").write_text(f"Book\n====\n\n.. toctree::\n\n{listed}\n")
    for name, body in pages.items():
        (root / f"{name}.rst").write_text(f"{name}\n{'=' * len(name)}\n\n{body}\n")
    static = {"html_static_path": ["book/_static"], "html_theme": "basic"}
    return build_site(root, extensions=["analysis.report.explorers"], **static)


def test_a_page_loads_what_its_explorers_need(tmp_path: Path) -> None:
    two = ".. explore:: seek\n\n.. explore:: values\n\n.. explore:: seek"
    assert site(tmp_path, one=".. explore:: seek", two=two, none="No explorer.") == ""
    pages = {p.stem: p.read_text() for p in (tmp_path / "out").glob("*.html")}
    shared = ["math.js", "draw.js", "explore.css"]
    for name, has in (("one", ["seek.js"]), ("two", ["seek.js", "values.js"]), ("none", [])):
        for script in ("seek.js", "values.js", *shared):
            expected = script in has or (bool(has) and script in shared)
            assert pages[name].count(f"explore/{script}") == expected, (name, script)
    assert pages["two"].count('data-explore="seek"') == 2
    assert pages["one"].index("explore/math.js") < pages["one"].index("explore/draw.js")
    assert pages["one"].index("explore/draw.js") < pages["one"].index("explore/seek.js")


def test_an_explorer_without_a_script_is_an_error(tmp_path: Path) -> None:
    assert "there is no book/_static/explore/other.js" in site(tmp_path, one=".. explore:: other")


@pytest.mark.parametrize(("language", "said"), [("en", "JavaScript"), ("zh_CN", "需要 JavaScript")])
def test_without_javascript_it_says_so(tmp_path: Path, language: str, said: str) -> None:
    site(tmp_path, one=".. explore:: seek")
    build = {"extensions": ["analysis.report.explorers"], "html_theme": "basic"}
    build_site(tmp_path, language=language, html_static_path=["book/_static"], **build)
    assert said in (tmp_path / "out/one.html").read_text()
