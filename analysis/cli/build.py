"""``analysis build``: executed notebooks and prose in, a book out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from analysis.report.build import BUILDERS, build_book
from analysis.report.project import find_project


def build(builder: Literal["html", "pdflatex"] = "html") -> None:
    """Check the runs, the prose and the results, then build the book from them.

    Nothing is executed: run "analysis run" first. A page that is missing, stale, edited, failed or
    quotes a number that no run recorded stops the build, and the earlier book stays.

    Args:
        builder: html for a website in _build/html, pdflatex for a PDF in _build/latex.
    """
    product = build_book(find_project(Path.cwd()), BUILDERS[builder])
    print(f"open {product.as_uri()}")
    if builder == "html":
        print("or run: make serve")
