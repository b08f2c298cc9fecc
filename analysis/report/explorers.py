"""Explorers on any page: the directive ``{explore} name`` and the scripts that it needs.

A Sphinx extension. ``book/_static/explore/<name>.js`` builds an explorer wherever a page has a
place for it; a page loads the scripts of those that it has, and no others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

#: Where the scripts lie, in the book's static files.
FOLDER = "explore"
#: What every explorer needs, in the order in which it is read.
SHARED = ("math", "draw")


class explorer_place(nodes.General, nodes.Element):
    """The place of an explorer, whose ``name`` is that of its script."""


class Explore(SphinxDirective):
    """``{explore} seek``: here the explorer of that name is built."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The place; an explorer without a script is an error."""
        name = self.arguments[0]
        if not (Path(self.env.srcdir) / f"book/_static/{FOLDER}/{name}.js").is_file():
            raise self.error(f"there is no book/_static/{FOLDER}/{name}.js")
        return [explorer_place(name=name)]


def place(translator: Any, node: explorer_place) -> None:
    """Write the place; without JavaScript it says that it needs it."""
    said = "这一部分需要 JavaScript。" if _is_chinese(translator) else "This part needs JavaScript."
    name = node["name"]
    translator.body.append(f'<div class="kl-explore" data-explore="{name}">{said}</div>\n')
    raise nodes.SkipNode


def _is_chinese(translator: Any) -> bool:
    return str(translator.config.language).startswith("zh")


def leave_out(translator: Any, node: explorer_place) -> None:
    """Paper has no explorers."""
    raise nodes.SkipNode


def load_scripts(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Let a page load the scripts of its explorers."""
    if doctree is None:
        return
    names = list(dict.fromkeys(node["name"] for node in doctree.findall(explorer_place)))
    if names:
        app.add_css_file(f"{FOLDER}/explore.css")
    for name in (*SHARED, *names) if names else ():
        app.add_js_file(f"{FOLDER}/{name}.js", loading_method="defer")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx)."""
    unseen = (leave_out, None)
    app.add_node(explorer_place, html=(place, None), latex=unseen, text=unseen)
    app.add_directive("explore", Explore)
    app.connect("html-page-context", load_scripts)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
