"""What the book's pages need of Sphinx beside its extensions. It does nine small things.

* serves MathJax from the book itself (``mathjax_path``), so that maths renders without a network;
* drops the script that would load Thebe from a network, and all icons that no page shows;
* moves the displayed formula that a theorem announces (its text ends with a colon or a comma) into
  the theorem's box;
* stores each page by itself, not with all pages that were read before it, reads it back once for
  all references to its figures, and draws the menu once for all pages of source;
* spares the garbage collector what stays;
* describes each page to search engines and cards by its first paragraph;
* points the Colab, Binder and edit links at ``notebooks/``, since ``book/_run/`` is not committed;
* labels citations so that no two works look the same (`analysis.report.citations`);
* registers the role ``{given}``, which shows a number that no run computes, such as a version.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
from functools import cache
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sphinx_thebe
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.builders import Builder
from sphinx.errors import ExtensionError
from sphinx_proof import nodes as proof_nodes

RUN_FOLDER = "book/_run/"
SOURCE_FOLDER = "notebooks/"
GENERATED_FOLDER = "book/_generated/"
MATHJAX = "mathjax/tex-mml-chtml.js"
MATHJAX_FONTS = "mathjax/output/chtml/fonts"

_STATEMENTS = tuple(proof_nodes.NODE_TYPES[name] for name in ("theorem", "proposition", "lemma"))
_DESCRIPTION = 200  # characters
_ICON_CLASS = re.compile(r"\bfa-([a-z0-9-]+)")
_ICON = re.compile(r'"?([a-z0-9-]+)"?:\[(\d+),(\d+),(\[[^\]]*\]),"[0-9a-f]+","([^"]+)"\]')
_DRAW_ICONS = """\
const icons = ICONS;
document.addEventListener("DOMContentLoaded", () => {
  for (const icon of document.querySelectorAll("i[class*='fa-']")) {
    const name = [...icon.classList].map((c) => c.slice(3)).find((n) => n in icons);
    if (!name) continue;
    const [width, height, outline] = icons[name];
    icon.innerHTML = `<svg viewBox="0 0 ${width} ${height}" width="1em" height="1em" ` +
      `fill="currentColor" aria-hidden="true"><path d="${outline}"/></svg>`;
  }
});
"""


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx)."""
    app.add_generic_role("given", nodes.inline)
    app.setup_extension("analysis.report.citations")
    app.kl_menus = {}
    app.connect("builder-inited", drop_thebe)
    app.connect("env-before-read-docs", pass_over_what_stays)
    app.connect("env-updated", pass_over_what_stays)
    app.connect("doctree-read", complete_theorems)
    app.connect("doctree-read", own_nodes, priority=990)
    app.connect("write-started", read_back_once)
    app.connect("html-page-context", share_menu, priority=400)  # before the theme draws
    app.connect("html-page-context", point_links_at_sources, priority=900)
    app.connect("html-page-context", describe_page)
    app.connect("build-finished", copy_mathjax)
    app.connect("build-finished", keep_used_icons)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def copy_mathjax(app: Sphinx, failure: Exception | None) -> None:
    """Copy the one script and the fonts that pages load (1.6 MB of the wheel's 32 MB)."""
    if failure is not None or app.builder.format != "html":
        return
    spec = find_spec("sphinx-mathjax-offline")
    if spec is None or not spec.submodule_search_locations:
        raise ExtensionError("MathJax is missing: pip install sphinx-mathjax-offline")
    source = Path(spec.submodule_search_locations[0]) / "static"
    target = Path(app.outdir) / "_static"
    (target / MATHJAX).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / MATHJAX, target / MATHJAX)
    shutil.copytree(source / MATHJAX_FONTS, target / MATHJAX_FONTS, dirs_exist_ok=True)


def keep_used_icons(app: Sphinx, failure: Exception | None) -> None:
    """Replace the theme's script of 1.5 MB of icons by the few that pages show."""
    path = Path(app.outdir) / "_static/scripts/fontawesome.js"
    if failure is not None or app.builder.format != "html" or not path.is_file():
        return
    path.with_suffix(".js.map").unlink(missing_ok=True)
    used = {
        name
        for page in Path(app.outdir).rglob("*.html")
        for name in _ICON_CLASS.findall(page.read_text(encoding="utf-8"))
    }
    icons = {}
    for names, width, height, others, outline in _ICON.findall(path.read_text(encoding="utf-8")):
        for name in (names, *re.findall(r'"([^"]+)"', others)):
            if name in used:
                icons[name] = [int(width), int(height), outline]
    path.write_text(_DRAW_ICONS.replace("ICONS", json.dumps(icons)), encoding="utf-8")


def complete_theorems(app: Sphinx, doctree: nodes.document) -> None:
    """Move a formula behind a theorem whose text announces it into the theorem's box.

    MyST nests a labelled display only in a longer fence, so chapters write it behind the box.
    """
    for theorem in list(doctree.findall(lambda n: isinstance(n, _STATEMENTS))):
        body = next((part for part in theorem.children if isinstance(part, nodes.section)), theorem)
        while body.astext().rstrip().endswith((":", ",")):
            at = theorem.parent.index(theorem) + 1
            parts = theorem.parent[at : at + 2]
            taken = parts if parts and isinstance(parts[0], nodes.target) else parts[:1]
            if not taken or not isinstance(taken[-1], nodes.math_block):
                break
            for part in taken:
                theorem.parent.remove(part)
                body.append(part)


def pass_over_what_stays(app: Sphinx, *_: Any) -> None:
    """Let no garbage collection walk over the modules, and then the pages, that stay."""
    gc.freeze()


def own_nodes(app: Sphinx, doctree: nodes.document) -> None:
    """Make every node one of its page's document.

    MyST parses reStructuredText in another one, which holds on to the environment, and so to the
    nodes of other pages: Sphinx would write them all with each page of the reference.
    """
    for node in doctree.findall():
        node.document = doctree


def read_back_once(app: Sphinx, builder: Builder) -> None:
    """Keep a page that a reference to a figure of it has read back from the disk, for the next one.

    The pages that are written are not read back: a build is of all pages.
    """
    if builder.format == "html":
        app.env.get_doctree = cache(app.env.get_doctree)


def share_menu(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Draw the menu once for all pages of source at one depth: it lists none of them."""
    if pagename.startswith("_modules/"):
        own = cache(context["toctree"])
        context["toctree"] = app.kl_menus.setdefault(pagename.count("/"), own)


def describe_page(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Give a page a description and a card: its title and its first paragraph."""
    if doctree is None:
        return
    first = next((p.astext() for p in doctree.findall(nodes.paragraph) if len(p.astext()) > 60), "")
    text = escape(_one_line(first), quote=True)
    title = escape(re.sub("<[^>]*>", "", str(context.get("title", ""))), quote=True)
    tags = {"og:title": title, "og:description": text, "og:type": "article"}
    lines = [f'<meta name="description" content="{text}" />']
    lines += [f'<meta property="{name}" content="{said}" />' for name, said in tags.items()]
    context["metatags"] = "\n".join([context.get("metatags", ""), *lines])


def _one_line(text: str) -> str:
    """A paragraph without its formulas' markup, cut at a word."""
    plain = " ".join(re.sub(r"[\\${}]", "", text).split())
    return plain if len(plain) <= _DESCRIPTION else plain[:_DESCRIPTION].rpartition(" ")[0] + " ..."


def drop_thebe(app: Sphinx) -> None:
    """Disconnect the extension that Jupyter Book always loads and that adds a remote script."""
    unwanted = (sphinx_thebe.init_thebe_core, sphinx_thebe.update_thebe_context)
    for listeners in list(app.events.listeners.values()):
        for listener in list(listeners):
            if listener.handler in unwanted:
                app.disconnect(listener.id)


def point_links_at_sources(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Point a page's buttons at the file it was made from; a generated page has none to edit."""
    context["header_buttons"] = _repointed(context.get("header_buttons", []), pagename)


def _repointed(buttons: list[dict[str, Any]], pagename: str) -> list[dict[str, Any]]:
    generated = pagename.startswith(GENERATED_FOLDER)
    kept = []
    for button in buttons:
        if generated and button.get("label") == "source-edit-button":
            continue
        if "buttons" in button:
            button = {**button, "buttons": _repointed(button["buttons"], pagename)}
        elif "://" in button.get("url", ""):
            button = {**button, "url": button["url"].replace(RUN_FOLDER, SOURCE_FOLDER)}
        kept.append(button)
    return kept
