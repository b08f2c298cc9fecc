"""Figures as files: the images that executed notebooks show, under the names their cells give them.

The landing page and the README show a figure of a chapter. Both take it from here, out of the
executed notebook, so that it cannot differ from the chapter's own.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import NamedTuple

import nbformat

from analysis.report.figure_data import KEY


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


def write_figures(folder: Path, target: Path) -> list[Path]:
    """Write the figures of all notebooks in ``folder`` to ``target/<name>.png``; returns the paths.

    A figure that no notebook has any more is removed, and an unchanged one is left alone.
    """
    found = figures(*sorted(folder.glob("*.ipynb")))
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
