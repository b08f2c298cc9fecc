"""Figures as files: what executed notebooks show, under the names that their cells give them.

The landing page and the README show a figure of a chapter. Both take it from here, out of the
executed notebook, so that it cannot differ from the chapter's own.

A Sphinx extension: it writes the images to ``book/_generated/figures/<name>.png``, since those of
glued figures do not cross pages, and links each figure of the site to the numbers in it.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from docutils import nodes
from sphinx.application import Sphinx

from analysis.report.figure_data import KEY
from analysis.report.project import Project
from analysis.report.translation import is_translated
from kl_term.files import replace_file

#: Where the site has the tables.
DATA = "_static/data"


class Shown(NamedTuple):
    """The PNG of a figure, and what it draws as a table, empty where it draws no data."""

    image: bytes
    table: str


def figures(*notebooks: Path) -> dict[str, Shown]:
    """What every figure cell of executed notebooks shows, by figure name.

    Raises:
        ValueError: a figure cell without an image, or one name on two cells; names both.
    """
    found: dict[str, Shown] = {}
    for notebook in notebooks:
        for cell in nbformat.read(notebook, as_version=4).cells:
            name = cell.metadata.get("mystnb", {}).get("figure", {}).get("name")
            if name is None:
                continue
            outputs = [out for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
            if not outputs:
                raise ValueError(f"{notebook.name}: figure {name!r} has no image; run the notebook")
            if name in found:
                raise ValueError(f"{notebook.name}: figure name {name!r} is used twice")
            table = outputs[0].get("metadata", {}).get("image/png", {}).get(KEY, "")
            found[name] = Shown(base64.b64decode(outputs[0].data["image/png"]), table)
    return found


def write_images(found: dict[str, Shown], target: Path) -> list[Path]:
    """Write figures to ``target/<name>.png``; returns the paths.

    A figure that is not found any more is removed, and an unchanged one is left alone.
    """
    target.mkdir(parents=True, exist_ok=True)
    paths = {target / f"{name}.png": shown.image for name, shown in found.items()}
    for stale in set(target.glob("*.png")) - set(paths):
        stale.unlink()
    for path, image in paths.items():
        if not path.exists() or path.read_bytes() != image:
            path.write_bytes(image)
    return sorted(paths)


def refresh_copies(folder: Path, notebooks: Path) -> list[Path]:
    """Bring the copies ``folder/fig-*.png`` up to date with the figures of ``notebooks``.

    The README shows such a copy, since a repository's front page cannot show a notebook's output.

    Returns:
        The copies that were out of date.

    Raises:
        ValueError: no notebook has the figure of a copy; names the copy.
    """
    found = figures(*sorted(notebooks.glob("*.ipynb")))
    changed = []
    for copy in sorted(folder.glob("fig-*.png")):
        if copy.stem not in found:
            raise ValueError(f"{copy.name}: no notebook in {notebooks.name}/ has this figure")
        if copy.read_bytes() != found[copy.stem].image:
            copy.write_bytes(found[copy.stem].image)
            changed.append(copy)
    return changed


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx)."""
    app.connect("builder-inited", _write_images)
    app.connect("doctree-resolved", _link_data)
    app.connect("build-finished", _write_data)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _write_images(app: Sphinx) -> None:
    project = Project(Path(app.srcdir))
    found = figures(*sorted(project.runs.glob("*.ipynb")))
    write_images(found, project.generated / "figures")
    app.kl_tables = {name: figure.table for name, figure in found.items() if figure.table}


def _link_data(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    if app.builder.format != "html":
        return
    root = "../" * (docname.count("/") + is_translated(app))
    for figure in doctree.findall(nodes.figure):
        stems = [Path(image["uri"]).stem for image in figure.findall(nodes.image)]
        name = next((n for n in (*figure["ids"], *stems) if n in app.kl_tables), None)
        caption = next(iter(figure.findall(nodes.caption)), None)
        if name is None or caption is None:
            continue
        target = f"{root}{DATA}/{name}.csv"
        said = "数据（CSV）" if is_translated(app) else "Data (CSV)"
        link = f' <a class="kl-data" href="{target}" download>{said}</a>'
        caption.append(nodes.raw("", link, format="html"))


def _write_data(app: Sphinx, failure: Exception | None) -> None:
    """Write the tables, once: editions in other languages share them."""
    if failure is not None or app.builder.format != "html" or is_translated(app):
        return
    folder = Path(app.outdir) / DATA
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in app.kl_tables.items():
        replace_file(folder / f"{name}.csv", data.encode())
