"""The built book in a browser without a network: over http and from disk, wide and on a phone."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.book.site_problems import book_pages

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
]

TYPESET = "() => (window.MathJax?.startup?.promise ?? Promise.resolve()).then(() => true)"
#: What is seen is fetched by and by, and what is not seen is not fetched.
LOADED = """() => Promise.all([...document.images].filter(i => i.getClientRects().length)
  .map(i => { i.loading = 'eager'; return i.decode().then(() => '', () => i.src); }))"""
SEEN = """() => {
  const article = document.querySelector('article');
  const text = [...article.querySelectorAll('p, li, td, th, h1, h2, h3, figcaption, .math')]
    .filter(e => !e.closest('pre, code')).map(e => e.innerText).join('\\n');
  return {
    formulas: article.querySelectorAll('.math').length,
    typeset: article.querySelectorAll('mjx-container').length,
    failed: article.querySelectorAll('mjx-merror, [data-mjx-error]').length,
    raw: text.match(/\\\\\\(|\\\\\\[|\\\\[a-zA-Z]{2,}|\\$\\$/g) ?? [],
    cut: [...article.querySelectorAll('div.math')]
      .filter(e => [e, ...e.querySelectorAll('mjx-container')]
        .some(b => b.scrollWidth > b.clientWidth + 1 && getComputedStyle(b).overflowX != 'visible'))
      .map(e => (e.id || e.innerText).slice(0, 60)),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    background: getComputedStyle(document.body).backgroundColor,
    dark: document.documentElement.dataset.theme === 'dark',
    figures: article.querySelectorAll('figure').length,
    shown: [...article.querySelectorAll('figure img')].filter(i => i.offsetParent).map(i => {
      const box = i.getBoundingClientRect(), style = getComputedStyle(i);
      const frame = 2 * (parseFloat(style.paddingLeft) + parseFloat(style.borderLeftWidth));
      const shown = (box.width - frame) / (box.height - frame);
      return [i.src.endsWith('-dark.png'), shown, i.naturalWidth / i.naturalHeight];
    }),
  };
}"""


@dataclass
class Visitor:
    """A browser tab that refuses the network and remembers everything that went wrong."""

    base: str
    page: playwright.Page
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.route("**/*", self._refuse_the_network)
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.faults.append(f"uncaught: {error}"))

    def _refuse_the_network(self, route: playwright.Route) -> None:
        url = route.request.url
        if url.startswith((self.base, "data:", "blob:")):
            route.continue_()
        else:
            self.faults.append(f"asked the network for {url}")
            route.abort()

    def _hear(self, message: playwright.ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console: {message.text}")

    def visit(self, name: str) -> list[str]:
        """Open a page, wait until its maths is typeset, and return what went wrong meanwhile."""
        self.faults.clear()
        self.page.goto(f"{self.base}/{name}")
        self.page.evaluate(TYPESET)
        return list(self.faults)


@pytest.fixture(scope="module")
def server(html: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=html)) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=["http wide light", "file phone dark"])
def visitor(
    request: pytest.FixtureRequest, html: Path, server: str, browser: playwright.Browser
) -> Iterator[Visitor]:
    origin, size, theme = request.param.split()
    context = browser.new_context(
        viewport=WIDE if size == "wide" else PHONE, color_scheme=theme, reduced_motion="reduce"
    )
    yield Visitor(server if origin == "http" else html.as_uri(), context.new_page())
    context.close()


def pages(html: Path) -> list[str]:
    """The pages of the book, and those that are translated."""
    ours, theirs = book_pages(html / "book"), book_pages(html / "zh/book")
    translated = (page for page in theirs if "untranslated" not in page.read_text("utf-8"))
    return sorted(page.relative_to(html).as_posix() for page in (*ours, *translated))


def test_every_page_is_quiet_typeset_and_fits_the_screen(visitor: Visitor, html: Path) -> None:
    problems, formulas = [], 0
    wide = visitor.page.viewport_size == WIDE
    for name in pages(html):
        problems += [f"{name}: {fault}" for fault in visitor.visit(name)]
        missing = [source for source in visitor.page.evaluate(LOADED) if source]
        seen = visitor.page.evaluate(SEEN)
        formulas += seen["formulas"]
        problems += [f"{name}: image {source} is not shown" for source in missing]
        problems += [f"{name}: raw TeX {raw}" for raw in seen["raw"]]
        if seen["typeset"] < seen["formulas"] or seen["failed"]:
            problems.append(
                f"{name}: {seen['typeset']} of {seen['formulas']} formulas typeset, "
                f"{seen['failed']} of them with an error"
            )
        if wide:
            problems += [
                f"{name}: formula {formula} is wider than its column; break it"
                for formula in seen["cut"]
            ]
        if seen["overflow"] > 0:
            problems.append(f"{name}: {seen['overflow']} px wider than the screen")
        if len(seen["shown"]) != seen["figures"]:
            problems.append(f"{name}: {len(seen['shown'])} images in {seen['figures']} figures")
        for dark, shown, natural in seen["shown"]:
            if dark != seen["dark"]:
                problems.append(f"{name}: a figure for {'dark' if dark else 'light'} pages")
            if abs(shown / natural - 1) > 0.02:
                problems.append(f"{name}: a figure is distorted from {natural:.2f} to {shown:.2f}")
    assert problems == []
    assert formulas > 10, "the book shows no maths: wrong folder?"


def test_the_address_of_the_site_leads_to_the_landing_page(visitor: Visitor) -> None:
    visitor.page.goto(f"{visitor.base}/index.html")
    visitor.page.wait_for_url("**/book/index.html", timeout=5000)
    assert visitor.page.locator("article h1").count() == 1


def test_search_finds_a_page(visitor: Visitor) -> None:
    faults = visitor.visit("search.html?q=reverse")
    visitor.page.wait_for_selector("#search-results li a", timeout=10000)
    assert faults == []
    assert visitor.page.locator("#search-results li a").count() >= 1


@pytest.mark.parametrize(
    ("asked", "page"),
    [
        ("appendix d", "_run/03_k3_counterexample"),
        ("infinite variance", "_run/03_k3_counterexample"),
        ("off-policy", "_run/07_off_policy"),
        ("prefix ratio", "_run/06_sequences"),
        ("low_var_kl", "answer"),
        ("distillation", "_run/18_distillation"),
        ("dpo", "_run/10_dpo"),
        ("bfloat16", "_run/14_frameworks"),
        ("deepseek-v3.2", "_run/07_off_policy"),
        ("process reward", "_run/16_objectives"),
    ],
)
def test_search_finds_first_the_page_about_it_and_shows_prose(
    server: str, browser: playwright.Browser, asked: str, page: str
) -> None:
    context = browser.new_context(viewport=WIDE, reduced_motion="reduce")
    visitor = Visitor(server, context.new_page())
    visitor.visit(f"search.html?q={asked}")
    first = visitor.page.locator("#search-results li").first
    first.locator("a").first.wait_for(timeout=10000)
    assert first.locator("a").first.get_attribute("href").startswith(f"book/{page}.html")
    visitor.page.wait_for_timeout(1500)
    for excerpt in visitor.page.locator("#search-results li p").all_inner_texts():
        assert not re.search(r"\\[a-z]{2,}|\\\(|Show the code|Hide the code", excerpt), excerpt
    context.close()


def test_a_formula_stops_the_tabulator_only_where_it_scrolls(visitor: Visitor) -> None:
    visitor.visit("book/_run/02_gradients.html")
    page = visitor.page
    marked = "[...document.querySelectorAll('mjx-container[tabindex]')].map(m => m.className)"
    page.wait_for_function(f"() => {marked}.every(names => names.includes('kl-more'))")
    scrolls = page.locator("article mjx-container").evaluate_all(
        """all => all.filter(m => getComputedStyle(m).overflowX === 'auto' &&
          m.scrollWidth > m.clientWidth + 1).length"""
    )
    assert page.locator("article mjx-container.kl-more[tabindex]").count() == scrolls
    assert (scrolls > 0) == (page.viewport_size == PHONE)


def test_there_is_one_search_box(visitor: Visitor) -> None:
    visitor.visit("book/notation.html")
    boxes = ".bd-header input[type=search], .bd-sidebar input[type=search], .search-button-field"
    assert visitor.page.locator(boxes).count() == 1


def test_the_ledger_is_filtered_by_source_kind_and_verdict(visitor: Visitor) -> None:
    faults = visitor.visit("book/_generated/ledger.html")
    page = visitor.page
    claims = page.locator(".claim")
    total = claims.count()
    press = lambda name: page.get_by_role("button", name=name, exact=True).click()
    shown = lambda: page.locator(".claim:visible").count()
    press("source E")
    of_source = shown()
    press("fails")
    both = shown()
    assert 0 < both < of_source < total
    assert both == page.locator(".claim-source-e.claim-fails").count()
    assert page.get_by_text(f"{both} of {total} claims", exact=True).is_visible()
    press("fails")
    press("source E")
    assert shown() == total
    assert faults == []


@pytest.mark.parametrize(("theme", "dark"), [("light", False), ("dark", True)])
def test_both_themes_render(
    html: Path, browser: playwright.Browser, theme: str, dark: bool
) -> None:
    context = browser.new_context(viewport=WIDE, color_scheme=theme)
    visitor = Visitor(html.as_uri(), context.new_page())
    assert visitor.visit("book/notation.html") == []
    background = visitor.page.evaluate(SEEN)["background"]
    channels = [int(part) for part in background.strip("rgba()").split(",")[:3]]
    assert (sum(channels) < 3 * 60) if dark else (sum(channels) > 3 * 240), background
    context.close()


def test_a_request_to_the_network_is_a_fault(browser: playwright.Browser, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<script src="https://example.org/x.js"></script>')
    context = browser.new_context()
    faults = Visitor(tmp_path.as_uri(), context.new_page()).visit("a.html")
    assert any("asked the network for https://example.org/x.js" in fault for fault in faults)
    context.close()
