"""Displayed formulas on a phone: they break, and no part of one is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.book.test_browser import (
    CHROMIUM,
    PHONE,
    TYPESET,
    browser,  # noqa: F401, a fixture
    playwright,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
]

#: How many displayed formulas there are and which scroll, and the characters of all in order.
COUNT = """() => {
  const all = [...document.querySelectorAll('article div.math mjx-container')];
  return {
    all: all.length,
    scroll: all.filter(e => e.scrollWidth > e.clientWidth + 1).length,
    broken: all.filter(e => e.classList.contains('kl-broken')).length,
    characters: all.map(e => [...e.querySelectorAll('mjx-math mjx-c')].map(c => c.className)),
    small: all.filter(e => parseFloat(e.style.fontSize || '1') < 0.75).length,
  };
}"""


def counted(page: playwright.Page, address: str) -> dict[str, object]:
    page.goto(address)
    page.evaluate(TYPESET)
    page.wait_for_timeout(400)
    return page.evaluate(COUNT)


@pytest.mark.parametrize("name", ["02_gradients", "06_sequences", "23_top_k"])
def test_formulas_fit_a_phone_and_lose_nothing(
    html: Path,
    browser: playwright.Browser,  # noqa: F811
    name: str,
) -> None:
    address = f"{html.as_uri()}/book/_run/{name}.html"
    wide, phone = browser.new_page(), browser.new_page(viewport=PHONE)
    whole, broken = counted(wide, address), counted(phone, address)
    wide.close()
    phone.close()
    assert whole["broken"] == 0 < broken["broken"]
    assert broken["characters"] == whole["characters"]
    assert broken["scroll"] <= 0.05 * broken["all"] and broken["small"] == 0
