"""The links between equations, claims and code, on a small book that Sphinx builds."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from analysis.report.api import PAGES, modules, modules_of
from tests.report.sites import build_site

ROOT = Path(__file__).resolve().parents[2]

MODULE = '''
from collections.abc import Callable

#: Of a type whose source is not ours.
Alias = Callable[[int], int]
#: Shown.
SHORT = "a word"
#: Not shown.
LONG = "a word\\n" * 100

def k3(logp):
    """The third.

    .. math:: l + 1

    Equation: ``k3``
    Source: someone, on a line
    that goes on.

    Args:
        logp: [...], nats.
    """


def unseen(logp):
    """Of no chapter.

    .. math::

        a - b

    Equation: ``unseen``
    """
'''
PAGE = """\
# Page

```{math}
:label: k3
x
```

$$ y $$ (k3-step)

As decided (S4-12) and misprinted in E-S1-03; `S4-12` is code and S4-99 nothing.
"""
LEDGER = "# Ledger\n\n(s4-12)=\nS4-12 is here.\n\n(e-s1-03)=\nE-S1-03 is here.\n"


def build(root: Path, module: str = MODULE) -> tuple[dict[str, str], str]:
    """The pages of a book of one module, and what Sphinx warned of."""
    book = root / "book"
    book.mkdir()
    (root / "api_example.py").write_text(module)
    (root / "index.md").write_text(
        "# Index\n\n```{toctree}\nbook/page\nbook/ledger\nbook/api\n```\n"
    )
    (book / "page.md").write_text(PAGE)
    (book / "ledger.md").write_text(LEDGER)
    (book / "api.md").write_text(
        "# API\n\n```{eval-rst}\n.. automodule:: api_example\n   :members:\n```\n"
    )
    warnings = build_site(
        root,
        extensions=["myst_parser", "analysis.report.api"],
        myst_enable_extensions=["dollarmath"],
        html_theme="basic",
        viewcode_follow_imported_members=False,
    )
    return {path.stem: path.read_text() for path in (root / "out/book").glob("*.html")}, warnings


@pytest.fixture(autouse=True)
def example(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("api_example", None)


def test_equations_claims_and_code_link_to_each_other(tmp_path):
    pages, warnings = build(tmp_path)
    assert warnings == ""
    page, api = pages["page"], pages["api"]
    assert len(re.findall(r'class="code-of"', page)) == 1
    assert 'href="api.html#api_example.k3"' in page
    assert 'href="page.html#equation-k3"' in api
    assert 'id="equation-unseen"' in api and "a - b" in api
    assert '_modules/api_example.html#k3"' in api
    assert "api_example.Alias" in api and not (tmp_path / "out/_modules/collections").exists()
    said = re.sub("<[^>]+>", "", api)
    assert "SHORT = 'a word'" in said and "LONG" in said and r"a word\n" not in said
    assert re.search(r"Source.*someone, on a line\s+that goes on", api, re.DOTALL)
    assert page.count('href="ledger.html#s4-12"') == page.count('href="ledger.html#e-s1-03"') == 1
    assert 'href="ledger.html' not in pages["ledger"].partition("S4-12 is here")[2][:200]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("``k3``", "``k4``", "names equation 'k4'; use the function's own name"),
        ("def k3", "def k5", "equation 'k3' names no function"),
    ],
)
def test_an_equation_without_its_function_is_a_warning(tmp_path, old, new, problem):
    module = MODULE.replace(old, new)
    if old == "def k3":
        module = module.replace("``k3``", "``k5``")
    assert problem in build(tmp_path, module)[1]


def test_an_equation_that_neither_side_shows_is_a_warning(tmp_path):
    module = MODULE.replace("    .. math::\n\n        a - b\n", "")
    assert "unseen" in build(tmp_path, module)[1]


def test_every_module_stands_on_one_page_of_the_reference() -> None:
    listed = [name for page in PAGES for name in modules_of(page)]
    packages = dict.fromkeys(package for _, package, _ in PAGES.values())
    assert sorted(listed) == sorted(name for package in packages for name in modules(package))
    assert len(set(listed)) == len(listed)
    assert all(modules_of(page) for page in PAGES)
    toc = (ROOT / "_toc.yml").read_text()
    assert re.findall(r"book/_generated/api_(\w+)", toc) == list(PAGES)
