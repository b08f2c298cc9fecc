"""Figures as files: the images that executed notebooks show, under the names their cells give them.

The landing page and the README show a figure of a chapter. Both take it from here, out of the
executed notebook, so that it cannot differ from the chapter's own.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import nbformat


def figures(notebook: Path) -> dict[str, bytes]:
    """The PNG of every figure cell of one executed notebook, by figure name.

    Raises:
        ValueError: a figure cell without an image, or one name on two cells; names both.
    """
    found: dict[str, bytes] = {}
    for cell in nbformat.read(notebook, as_version=4).cells:
        name = cell.metadata.get("mystnb", {}).get("figure", {}).get("name")
        if name is None:
            continue
        image = _image(cell.get("outputs", []))
        if image is None:
            raise ValueError(f"{notebook.name}: figure {name!r} has no image; run the notebook")
        if name in found:
            raise ValueError(f"{notebook.name}: figure name {name!r} is used twice")
        found[name] = image
    return found


def write_figures(folder: Path, target: Path) -> list[Path]:
    """Write the figures of all notebooks in ``folder`` to ``target/<name>.png``; returns the paths.

    A figure that no notebook has any more is removed, and an unchanged one is left alone.
    """
    images = _figures_of_all(folder)
    target.mkdir(parents=True, exist_ok=True)
    paths = {target / f"{name}.png": image for name, image in images.items()}
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
    images = _figures_of_all(notebooks)
    changed = []
    for copy in sorted(folder.glob("fig-*.png")):
        if copy.stem not in images:
            raise ValueError(f"{copy.name}: no notebook in {notebooks.name}/ has this figure")
        if copy.read_bytes() != images[copy.stem]:
            copy.write_bytes(images[copy.stem])
            changed.append(copy)
    return changed


def _figures_of_all(folder: Path) -> dict[str, bytes]:
    images: dict[str, bytes] = {}
    for notebook in sorted(folder.glob("*.ipynb")):
        for name, image in figures(notebook).items():
            if name in images:
                raise ValueError(f"{notebook.name}: figure name {name!r} is in another notebook")
            images[name] = image
    return images


def _image(outputs: list[Any]) -> bytes | None:
    for output in outputs:
        png = output.get("data", {}).get("image/png")
        if png is not None:
            return base64.b64decode(png)
    return None
