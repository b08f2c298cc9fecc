"""What pages make of the address of the project.

A Sphinx extension: while ``address.yaml`` is empty, pages name no repository; once it is filled in,
they have the buttons of Colab and Binder, links to edit them, and a sitemap. ``{cite-book}`` shows
how the book is cited, ``{{ address.sources }}`` what to fetch before a command is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util.docutils import SphinxDirective

from analysis.report.address import Address, bibtex, load_address, sources
from analysis.report.project import Project


class CiteBook(SphinxDirective):
    """``{cite-book}``: the entry by which the book is cited."""

    def run(self) -> list[nodes.Node]:
        """A block of BibTeX."""
        text = bibtex(self.config.kl_address, year=str(self.config.copyright))
        return [nodes.literal_block(text, text, language="bibtex")]


def configure(app: Sphinx, config: Config) -> None:
    """Give the theme what it makes buttons from, and pages what they name."""
    address = load_address(Project(Path(app.srcdir)))
    config.kl_address = address
    theme = dict(config.html_theme_options)
    if address.repository:
        theme |= {"repository_url": address.repository, "repository_branch": address.branch}
        theme |= {f"use_{what}_button": True for what in ("repository", "issues", "edit_page")}
        colab = {"colab_url": "https://colab.research.google.com"}
        theme["launch_buttons"] = {**colab, "binderhub_url": "https://mybinder.org"}
    config.html_theme_options = theme
    if address.site:
        config.html_baseurl = f"{address.site}/"
    if address.authors:
        config.author = ", ".join(address.authors)
    shown = {"sources": sources(address)}
    config.myst_substitutions = {**getattr(config, "myst_substitutions", {}), "address": shown}


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx)."""
    app.add_config_value("kl_address", Address(), "env", Address)
    app.add_directive("cite-book", CiteBook)
    app.connect("config-inited", configure)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
