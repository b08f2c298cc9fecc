"""What a reader would find broken in the built HTML: links, anchors, alt texts, calls to a network.

The check is static: it reads the files and opens no page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FILE_NAME = re.compile(r"\.(png|svg|jpe?g|gif|webp)$|^[\w./-]*/[\w./-]*$", re.IGNORECASE)
_PLACEHOLDERS = {"", "alt text", "image", "figure", "alt"}
_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src"}
_LOADED_RELATIONS = {"stylesheet", "icon", "preload", "prefetch", "modulepreload", "preconnect"}


@dataclass
class _Page(HTMLParser):
    """The parts of one page that can be broken."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)  # followed by a reader
    loads: list[str] = field(default_factory=list)  # fetched by the browser
    images: list[tuple[str, str]] = field(default_factory=list)  # address, alt text

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and _LOADED_RELATIONS & set(values.get("rel", "").split()):
            self.loads.append(values.get("href", ""))
        if values.get(_LOADED.get(tag, "")):
            self.loads.append(values[_LOADED[tag]])
        if tag == "img":
            self.images.append((values.get("src", ""), values.get("alt", "")))


def site_problems(html: Path) -> list[str]:
    """Everything broken in the built site below ``html``, one line each; empty when it is whole.

    Raises:
        ValueError: there is no page below ``html``.
    """
    found = sorted(
        path for path in html.rglob("*.html") if "_static" not in path.relative_to(html).parts
    )
    pages = {path: _read(path) for path in found}
    if not pages:
        raise ValueError(f"{html}: no built page; run make book")
    problems = []
    for path, page in pages.items():
        label = path.relative_to(html).as_posix()
        problems += [f"{label}: {said}" for said in _alt_problems(page)]
        problems += [f"{label}: loads {url} from a network" for url in page.loads if _remote(url)]
        for url in page.links + page.loads:
            if said := _link_problem(url, path, pages):
                problems.append(f"{label}: {said}")
    return list(dict.fromkeys(problems))


def book_pages(folder: Path) -> list[Path]:
    """The pages below ``folder``, but for old addresses, which only lead on."""
    return [
        path
        for path in sorted(folder.rglob("*.html"))
        if 'http-equiv="refresh"' not in path.read_text(encoding="utf-8")
    ]


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _remote(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") or bool(parts.netloc)


def _alt_problems(page: _Page) -> list[str]:
    return [
        f"image {source} needs a description, not alt={alt!r}"
        for source, alt in page.images
        if alt.strip().lower() in _PLACEHOLDERS or _FILE_NAME.search(alt.strip())
    ]


def _link_problem(url: str, path: Path, pages: dict[Path, _Page]) -> str | None:
    parts = urlsplit(url)
    if parts.scheme or parts.netloc:
        return None
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target = target / "index.html"
    if not target.exists():
        return f"link to {url}, which does not exist"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return f"link to {url}, whose page has no anchor {anchor!r}"
    return None
