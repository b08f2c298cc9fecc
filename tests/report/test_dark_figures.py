"""Figures on dark pages: legible, told apart, known by their hue, and beside the light ones."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from analysis.report.dark_figures import PAGE, dark_colours, dark_image
from kl_term import style
from tests.report.sites import build_site
from tests.report.test_style import VISION, XYZ, cielab, linear

NAMES = list(style.COLOURS)
GREYS = [(v, v, v) for v in np.linspace(0, 1, 21)]


def dark(*colours: str) -> np.ndarray:
    return dark_colours(np.array([to_rgb(colour) for colour in colours]))


def contrast_on_page(colour: np.ndarray) -> float:
    one, page = (float(XYZ[1] @ linear(c)) + 0.05 for c in (colour, PAGE))
    return one / page


def test_white_is_the_page_and_ink_is_read_on_it() -> None:
    assert dark("white")[0] == pytest.approx(to_rgb(PAGE), abs=1e-6)
    for ink in ("black", style._INK, style.QUIET):
        assert contrast_on_page(dark(ink)[0]) >= 7
    assert 1.1 < contrast_on_page(dark(style._GRID)[0]) < 1.6  # as faint as on white


def test_the_darker_the_lighter() -> None:
    greys = dark_colours(np.array(GREYS))
    assert (np.diff(greys[:, 0]) < 0).all()
    assert np.ptp(greys, axis=1).max() < 1e-6  # and a grey stays grey


@pytest.mark.parametrize("name", NAMES)
def test_lines_and_their_labels_are_visible_and_keep_their_hue(name: str) -> None:
    light = style.COLOURS[name]
    for colour in (light, style.text_colour(light)):
        assert contrast_on_page(dark(colour)[0]) >= 4.5
    before, after = (cielab(linear(c))[1:] for c in (light, dark(light)[0]))
    if np.hypot(*before) > 20:  # else it has no hue
        angle = np.degrees(np.arctan2(*after) - np.arctan2(*before))
        assert abs((angle + 180) % 360 - 180) < 30


@pytest.mark.parametrize("vision", VISION)
def test_no_two_colours_are_confused(vision: str) -> None:
    seen = dict(zip(NAMES, dark(*style.COLOURS.values()), strict=True))
    seen = {name: cielab(VISION[vision] @ linear(colour)) for name, colour in seen.items()}
    nearest = min(
        (float(np.linalg.norm(seen[a] - seen[b])), a, b)
        for a, b in itertools.combinations(NAMES, 2)
    )
    assert nearest[0] >= 7, nearest


def figure() -> bytes:
    drawn, axes = style.subplots()
    axes.plot([0, 1], [0, 1], **style.line("k3"))
    axes.set_title("A title")
    return style.png(drawn)


def test_a_dark_image_has_the_same_pixels_and_about_the_same_weight() -> None:
    light = figure()
    made = dark_image(light)
    assert made == dark_image(light) != light
    assert len(made) < 1.2 * len(light)
    one, other = (np.array(Image.open(io.BytesIO(data)).convert("RGB")) for data in (light, made))
    assert one.shape == other.shape
    expected = np.rint(255 * dark_colours(one.reshape(-1, 3) / 255)).reshape(one.shape)
    assert (np.abs(expected - other) <= 1).all()


def test_a_dark_image_is_what_pillow_writes_of_another_palette_whatever_the_light_one_is() -> None:
    light = Image.open(io.BytesIO(figure()))
    palette = dark_colours(np.array(light.getpalette("RGB")).reshape(-1, 3) / 255)
    light.putpalette(np.rint(palette * 255).astype(int).ravel().tolist())
    written, whole = io.BytesIO(), io.BytesIO()
    light.save(written, format="png", optimize=True)
    assert dark_image(figure()) == written.getvalue()
    Image.open(io.BytesIO(figure())).convert("RGBA").save(whole, format="png")
    assert Image.open(io.BytesIO(dark_image(whole.getvalue()))).mode == "P"


def test_a_page_has_both_and_fetches_what_it_shows(tmp_path: Path) -> None:
    (tmp_path / "fig.png").write_bytes(figure())
    (tmp_path / "index.rst").write_text(
        "Book\n====\n\n.. figure:: fig.png\n   :name: fig-a\n   :alt: A line.\n\n   Said once.\n"
    )
    extensions = ["analysis.report.dark_figures"]
    assert build_site(tmp_path, extensions=extensions, html_theme="basic") == ""
    page = (tmp_path / "out/index.html").read_text()
    for look, name in (("kl-light", "fig.png"), ("kl-dark", "fig-dark.png")):
        (tag,) = [t for t in page.split("<img")[1:] if look in t.partition(">")[0]]
        assert f"_images/{name}" in tag and 'loading="lazy"' in tag and 'alt="A line."' in tag
    assert (tmp_path / "out/_images/fig-dark.png").read_bytes() == dark_image(figure())
    assert page.count("Said once.") == page.count('id="fig-a"') == 1
