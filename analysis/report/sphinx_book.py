"""The book's one Sphinx extension of its own, loaded by ``_config.yml``. It does six small things.

* serves MathJax from the book itself, so that maths renders without a network;
* drops the script that would load Thebe from a network;
* takes figures out of the executed notebooks, so that other pages can show them
  (``book/_generated/figures/<name>.png``; the images of glued figures do not cross pages);
* points the Colab, Binder and edit links at ``notebooks/``, since ``book/_run/`` is not committed;
* labels citations so that no two works look the same (`analysis.report.citations`);
* registers the role ``{given}``, which shows a number that no run computes, such as a version.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sphinx_thebe
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from analysis.report.run_figures import write_figures

RUN_FOLDER = "book/_run/"
SOURCE_FOLDER = "notebooks/"
GENERATED_FOLDER = "book/_generated/"
MATHJAX = "mathjax/tex-mml-chtml.js"
MATHJAX_FONTS = "mathjax/output/chtml/fonts"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx)."""
    app.add_role("given", given)
    app.setup_extension("analysis.report.citations")
    app.connect("config-inited", use_local_mathjax, priority=100)
    app.connect("builder-inited", drop_thebe)
    app.connect("builder-inited", extract_run_figures)
    app.connect("html-page-context", point_links_at_sources, priority=900)
    app.connect("build-finished", copy_mathjax)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def given(
    name: str, rawtext: str, text: str, lineno: int, inliner: Any, *_: Any
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """``{given}`2.13` `` shows ``2.13``: a number that is given, not computed."""
    return [nodes.inline(rawtext, text, classes=["given"])], []


def use_local_mathjax(app: Sphinx, config: Any) -> None:
    """Load MathJax from ``_static`` instead of a content network."""
    config.mathjax_path = MATHJAX


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


def drop_thebe(app: Sphinx) -> None:
    """Disconnect the extension that Jupyter Book always loads and that adds a remote script."""
    unwanted = (sphinx_thebe.init_thebe_core, sphinx_thebe.update_thebe_context)
    for listeners in list(app.events.listeners.values()):
        for listener in list(listeners):
            if listener.handler in unwanted:
                app.disconnect(listener.id)


def extract_run_figures(app: Sphinx) -> None:
    """Write each named figure of the executed notebooks as a PNG that any page can show."""
    root = Path(app.srcdir)
    write_figures(root / RUN_FOLDER, root / GENERATED_FOLDER / "figures")


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
