"""Every page, wide and light or narrow and dark, by axe: nothing bars a voice or a keyboard."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.book.test_browser import (
    CHROMIUM,
    PHONE,
    TYPESET,
    WIDE,
    browser,  # noqa: F401, a fixture
    pages,
    playwright,
)

AXE = "axe-core@4.14.1"
FOUND = """(only) => axe.run(document, {
  resultTypes: ['violations'], ...(only && {runOnly: {type: 'rule', values: only}})
}).then(found => found.violations
  .filter(v => ['serious', 'critical'].includes(v.impact))
  .flatMap(v => v.nodes.map(n => `${v.id}: ${n.target.join(' ')}`)))"""

#: The rule that asks how wide a formula is; the others need not look at its thousand parts.
OF_WIDTH = ["scrollable-region-focusable"]
#: What a theme may change; the rest is the same document.
OF_LOOKS = ["color-contrast", "link-in-text-block"]
#: Where the parts of formulas are looked at too; they are MathJax's on every page.
WITH_FORMULAS = ["book/_run/02_gradients.html"]
SHORTEN = "document.querySelectorAll('mjx-container').forEach(e => e.replaceChildren('x'))"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
    pytest.mark.skipif(shutil.which("npm") is None, reason="no npm on this machine"),
]


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("axe")
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder, AXE]
    subprocess.run(install, check=True, timeout=120)
    return (folder / "node_modules/axe-core/axe.min.js").read_text()


@pytest.mark.parametrize(("theme", "only"), [("light", None), ("dark", OF_LOOKS)])
def test_no_page_has_a_serious_finding(
    html: Path,
    browser: playwright.Browser,  # noqa: F811
    axe: str,
    theme: str,
    only: list[str] | None,
) -> None:
    size = WIDE if theme == "light" else PHONE
    context = browser.new_context(viewport=size, color_scheme=theme, reduced_motion="reduce")
    page, problems = context.new_page(), []
    for name in [*pages(html), "search.html", "genindex.html"]:
        page.goto(f"{html.as_uri()}/{name}")
        page.evaluate(TYPESET)
        if name == "book/explore.html":
            page.wait_for_selector("[data-explore=runs] table")
        page.evaluate(axe)
        found = page.evaluate(FOUND, OF_WIDTH)
        if name not in WITH_FORMULAS:
            page.evaluate(SHORTEN)
        found += page.evaluate(FOUND, only)
        problems += [f"{name}: {finding}" for finding in found]
    context.close()
    assert problems == []
    assert len(pages(html)) > 20
    assert set(pages(html)) >= set(WITH_FORMULAS)


def test_a_page_without_names_is_found(browser: playwright.Browser, axe: str) -> None:  # noqa: F811
    page = browser.new_page()
    page.set_content('<html lang="en"><title>x</title><main><button></button></main>')
    page.evaluate(axe)
    assert any(finding.startswith("button-name") for finding in page.evaluate(FOUND))
    page.close()
