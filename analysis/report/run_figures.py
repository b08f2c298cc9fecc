"""Figures as files: what executed notebooks show, under the names that their cells give them.

The landing page and the README show a figure of a chapter. Both take it from here, out of the
executed notebook, so that it cannot differ from the chapter's own.

A Sphinx extension: it writes the images to ``book/_generated/figures/<name>.png``, since those of
glued figures do not cross pages, and links each figure of the site to the numbers in it. Below a
figure of an edition in another language it says what the words in it mean.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from docutils import nodes
from sphinx.application import Sphinx

from analysis.report.figure_data import KEY, WORDS
from analysis.report.pages import run_pages
from analysis.report.project import Project
from analysis.report.translation import FIGURES, is_translated, load
from kl_term.files import replace_file

#: Where the site has the tables.
DATA = "_static/data"
_FORMULA = re.compile(r"\$([^$]*)\$")


class Shown(NamedTuple):
    """The PNG of a figure, what it draws as a table, empty where it draws no data, its words."""

    image: bytes
    table: str
    words: tuple[str, ...] = ()


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
            beside = outputs[0].get("metadata", {}).get("image/png", {})
            image = base64.b64decode(outputs[0].data["image/png"])
            found[name] = Shown(image, beside.get(KEY, ""), tuple(beside.get(WORDS, ())))
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
    # a run of a chapter that is no longer in the book may lie there still
    found = figures(*(run.output for run in run_pages(project)))
    write_images(found, project.generated / "figures")
    app.kl_tables = {name: figure.table for name, figure in found.items() if figure.table}
    app.kl_words = {name: figure.words for name, figure in found.items()}
    app.kl_meanings = load(project, FIGURES) if is_translated(app) else {}


def _link_data(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    if app.builder.format != "html":
        return
    root = "../" * (docname.count("/") + is_translated(app))
    for figure in doctree.findall(nodes.figure):
        stems = [Path(image["uri"]).stem for image in figure.findall(nodes.image)]
        name = next((n for n in (*figure["ids"], *stems) if n in app.kl_words), None)
        caption = next(iter(figure.findall(nodes.caption)), None)
        if name is None or caption is None:
            continue
        if name in app.kl_tables:
            target = f"{root}{DATA}/{name}.csv"
            said = "数据（CSV）" if is_translated(app) else "Data (CSV)"
            link = f' <a class="kl-data" href="{target}" download>{said}</a>'
            caption.append(nodes.raw("", link, format="html"))
        figure.extend(glossary(app.kl_words[name], app.kl_meanings))


def glossary(words: tuple[str, ...], meanings: Mapping[str, str]) -> list[nodes.Node]:
    """What the words of a figure mean, folded away, where all are known; names are left out."""
    pairs = [(word, meanings[word]) for word in words if meanings.get(word, word) != word]
    if not pairs or not meanings.keys() >= set(words):
        return []
    opening = '<details class="kl-words"><summary>图中文字</summary>'
    paragraph = nodes.paragraph()
    for number, (word, meaning) in enumerate(pairs):
        paragraph += nodes.Text("；" if number else "")
        paragraph += nodes.emphasis("", "", *_inline(word))
        paragraph += nodes.Text("：")
        paragraph.extend(_inline(meaning))
    raw = [nodes.raw("", text, format="html") for text in (opening, "</details>")]
    return [nodes.legend("", raw[0], paragraph, raw[1])]


def _inline(text: str) -> Iterator[nodes.Node]:
    """Text with its formulas."""
    for number, part in enumerate(_FORMULA.split(text)):
        if part:
            yield nodes.math(part, part) if number % 2 else nodes.Text(part)


def _write_data(app: Sphinx, failure: Exception | None) -> None:
    """Write the tables, once: editions in other languages share them."""
    if failure is not None or app.builder.format != "html" or is_translated(app):
        return
    folder = Path(app.outdir) / DATA
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in app.kl_tables.items():
        replace_file(folder / f"{name}.csv", data.encode())
