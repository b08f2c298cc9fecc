"""Figures for dark pages: every figure of the book drawn a second time, light on dark.

A figure is an image in 256 colours (:func:`kl_term.style.png`). Its dark version has the same
pixels in other colours: the lightness of each is turned round, from white to the colour of a dark
page, and the hue stays, so that a line is known by its colour on either page. Nothing is run again.

A Sphinx extension, for HTML only: it puts the dark version of each image beside it. The page shows
one of the two and fetches no other (``book/_static/custom.css``).
"""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from docutils import nodes
from PIL import Image
from sphinx.application import Sphinx

#: The colour of a dark page, which is what white becomes.
PAGE = "#121212"
#: Darkness in Oklab -> how much lighter than the page. Colours of lines, in the middle, keep their
#: distances; near black, where there is ink alone, lightness runs out.
_DARKNESS, _ABOVE_PAGE = (0.0, 0.47, 1.0), (0.0, 0.614, 0.75)
_LIGHT, _DARK = "kl-light", "kl-dark"
#: The name of the chunk of a PNG that holds its palette.
_PALETTE = b"PLTE"

# Ottosson (2020), Oklab: linear RGB to cone responses, and their cube roots to lightness and hue.
_TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def dark_colours(colours: np.ndarray) -> np.ndarray:
    """Colours for a dark page: white becomes :data:`PAGE`, black nearly white, hues stay.

    Args:
        colours: [N, 3], sRGB from 0 to 1.

    Returns:
        [N, 3], sRGB. A hue that has no such lightness is as colourful as it can be.
    """
    lab = _lab(colours)
    page = _lab(_rgb(PAGE))[0, 0]
    lightness = page + np.interp(1 - lab[:, 0], _DARKNESS, _ABOVE_PAGE)
    full, none = np.ones(len(lab)), np.zeros(len(lab))
    for _ in range(30):  # the largest chroma inside the gamut, by halving
        middle = (full + none) / 2
        inside = _inside(_linear(lightness, lab[:, 1:] * middle[:, None]))
        none, full = np.where(inside, middle, none), np.where(inside, full, middle)
    whole = _inside(_linear(lightness, lab[:, 1:]))
    chroma = np.where(whole, 1.0, none)
    return _encoded(_linear(lightness, lab[:, 1:] * chroma[:, None]))


def dark_image(light: bytes) -> bytes:
    """The dark version of a PNG: its palette is another, and all else the same bytes."""
    image = Image.open(io.BytesIO(light))
    if image.mode != "P":
        written = io.BytesIO()
        image = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        image.save(written, format="png", optimize=True)
        light = written.getvalue()
    begin = light.index(_PALETTE)  # behind its length, before its checksum
    end = begin + len(_PALETTE) + int.from_bytes(light[begin - 4 : begin])
    palette = np.frombuffer(light[begin + len(_PALETTE) : end], np.uint8).reshape(-1, 3) / 255
    dark = _PALETTE + np.rint(dark_colours(palette) * 255).astype(np.uint8).tobytes()
    return light[:begin] + dark + zlib.crc32(dark).to_bytes(4) + light[end + 4 :]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx)."""
    app.connect("doctree-resolved", add_dark_versions)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def add_dark_versions(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put the dark version of each PNG of a page behind it; what is not seen is not fetched."""
    if app.builder.format != "html":
        return
    for image in list(doctree.findall(nodes.image)):
        source = Path(app.srcdir) / image["uri"]
        if source.suffix != ".png" or not source.is_file():
            continue
        address = str(Path(image["uri"]).with_name(f"{source.stem}-dark.png"))
        target = source.with_name(Path(address).name)
        if not target.is_file() or target.stat().st_mtime_ns < source.stat().st_mtime_ns:
            target.write_bytes(dark_image(source.read_bytes()))
        dark = image.deepcopy()
        dark["uri"], dark["candidates"] = address, {"*": address}
        app.env.images.add_file(docname, address)
        for node, look in ((image, _LIGHT), (dark, _DARK)):
            node["classes"] = [*node["classes"], look]
            node["loading"] = "lazy"
        dark["ids"] = []
        image.parent.insert(image.parent.index(image) + 1, dark)


def _rgb(colour: str) -> np.ndarray:
    return np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]])


def _lab(colours: np.ndarray) -> np.ndarray:
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    return np.cbrt(linear @ _TO_CONES.T) @ _TO_LAB.T


def _linear(lightness: np.ndarray, hue: np.ndarray) -> np.ndarray:
    lab = np.column_stack([lightness, hue])
    return (lab @ np.linalg.inv(_TO_LAB).T) ** 3 @ np.linalg.inv(_TO_CONES).T


def _inside(linear: np.ndarray) -> np.ndarray:
    return ((linear >= -1e-9) & (linear <= 1 + 1e-9)).all(-1)


def _encoded(linear: np.ndarray) -> np.ndarray:
    clipped = linear.clip(0, 1)
    return np.where(clipped <= 0.0031308, clipped * 12.92, 1.055 * clipped ** (1 / 2.4) - 0.055)
