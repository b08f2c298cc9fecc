"""What the site offers beside its pages: the book as a PDF, card and sitemap.

A Sphinx extension, for HTML only.

* Where the book was built as a PDF from the same inputs, each page's download menu has it.
* Links to the site show a card, drawn from the estimators themselves.
* Where ``html_baseurl`` says where the site stands, a sitemap lists the pages: it needs whole
  addresses.
"""

from __future__ import annotations

import shutil
from html import escape
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from sphinx.application import Sphinx

from analysis.report.build import current_pdf
from analysis.report.project import Project
from kl_term import style
from kl_term.files import replace_file
from kl_term.kl.surrogates import ESTIMATORS

CARD = "_static/card.png"
PDF = "kl-term.pdf"


def sitemap(base: str, pages: list[str]) -> str:
    """The sitemap of pages, addresses relative to ``base``."""
    places = [f"<url><loc>{escape(base.rstrip('/'))}/{escape(page)}</loc></url>" for page in pages]
    head = '<?xml version="1.0" encoding="utf-8"?>\n'
    name = '<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">'
    return "\n".join([f"{head}{name}", *places, "</urlset>\n"])


def card() -> Figure:
    """The picture of the site where others link to it, 1200 by 630 pixels."""
    figure = Figure(figsize=(12, 6.3), dpi=50, facecolor="white")
    axes = figure.add_axes((0.62, 0.16, 0.29, 0.68))
    log_ratio = torch.linspace(-2.2, 3.0, 200, dtype=torch.float64)
    for name, width in (("k1", 6), ("k2", 6), ("k3", 6)):
        values = ESTIMATORS[name](log_ratio, torch.zeros_like(log_ratio)).numpy()
        axes.plot(log_ratio.numpy(), values, color=style.COLOURS[name], linewidth=width)
        end = {"x": 3.15, "y": values[-1], "va": "center", "fontsize": 26}
        axes.text(s=style.LABELS[name], color=style.COLOURS[name], **end)
    axes.axhline(0, color=style.QUIET, linewidth=1)
    axes.set_axis_off()
    figure.text(0.06, 0.60, "The KL Term", fontsize=50, weight="bold", color=style.COLOURS["exact"])
    said = (
        "What the KL term of GRPO and RLHF\nreally optimises: proved, enumerated,\n"
        "measured, and yours to run."
    )
    figure.text(0.06, 0.26, said, fontsize=23, color=style.QUIET, linespacing=1.4)
    return figure


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx)."""
    app.connect("builder-inited", _read)
    app.connect("html-page-context", _describe_files, priority=950)
    app.connect("build-finished", _write_files)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _read(app: Sphinx) -> None:
    app.kl_pdf = current_pdf(Project(Path(app.srcdir)))


def _describe_files(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    pathto = context["pathto"]
    base = app.config.html_baseurl
    image = f"{base.rstrip('/')}/{CARD}" if base else pathto(CARD, 1)
    tags = [
        f'<meta property="og:image" content="{escape(image, quote=True)}" />',
        '<meta property="og:site_name" content="The KL Term" />',
        '<meta name="twitter:card" content="summary_large_image" />',
    ]
    context["metatags"] = "\n".join([context.get("metatags", ""), *tags])
    if app.kl_pdf is None:
        return
    for menu in context.get("header_buttons", []):
        if menu.get("label") == "download-buttons":
            menu["buttons"].append(
                {
                    "type": "link",
                    "url": pathto(PDF, 1),
                    "text": "the book (.pdf)",
                    "icon": "fas fa-file-pdf",
                    "tooltip": "Download the whole book",
                    "label": "download-book-button",
                }
            )


def _write_files(app: Sphinx, failure: Exception | None) -> None:
    if failure is not None or app.builder.format != "html":
        return
    out = Path(app.outdir)
    replace_file(out / CARD, style.png(card()))
    if app.kl_pdf is not None:
        shutil.copyfile(app.kl_pdf, out / PDF)
    if app.config.html_baseurl:
        pages = sorted(f"{name}.html" for name in app.env.found_docs)
        replace_file(out / "sitemap.xml", sitemap(app.config.html_baseurl, pages).encode())
