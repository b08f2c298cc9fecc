"""Old addresses lead on: a page that was merged into another one keeps its place on the site.

A Sphinx extension, for HTML only. ``moved_pages`` in ``_config.yml`` says which page an old one
became part of. At the old address stands a page that leads to the new one, to the same theorem or
section, with and without scripts; the search and the menu do not know it.
"""

from __future__ import annotations

import posixpath
from html import escape
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

from kl_term.files import replace_file

_PAGE = """\
<!DOCTYPE html>
<html lang="{language}">
<head>
<meta charset="utf-8" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<meta name="robots" content="noindex" />
<title>{title}</title>
<link rel="canonical" href="{target}" />
<script>location.replace("{target}" + location.hash)</script>
<noscript><meta http-equiv="refresh" content="0; url={target}" /></noscript>
</head>
<body><p><a href="{target}">{title}</a></p></body>
</html>
"""


def leading_page(old: str, new: str, *, title: str, language: str = "en") -> str:
    """The page at an old address, both addresses relative to the site and without ``.html``."""
    target = posixpath.relpath(f"{new}.html", posixpath.dirname(old) or ".")
    return _PAGE.format(target=escape(target), title=escape(title), language=escape(language))


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Refuse an old address that a page has, and a new one that no page has.

    Raises:
        ExtensionError: which of the two.
    """
    for old, new in app.config.moved_pages.items():
        if old in env.found_docs:
            raise ExtensionError(f"moved_pages: {old} is a page of the book")
        if new not in env.found_docs:
            raise ExtensionError(f"moved_pages: {old} leads to {new}, which is no page")


def write_pages(app: Sphinx, failure: Exception | None) -> None:
    """Write a page at each old address."""
    if failure is not None or app.builder.format != "html":
        return
    for old, new in app.config.moved_pages.items():
        path = Path(app.outdir, f"{old}.html")
        path.parent.mkdir(parents=True, exist_ok=True)
        said = {"title": app.env.titles[new].astext(), "language": app.config.language or "en"}
        replace_file(path, leading_page(old, new, **said).encode())


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx)."""
    app.add_config_value("moved_pages", {}, "html", dict)
    app.connect("env-check-consistency", check)
    app.connect("build-finished", write_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
