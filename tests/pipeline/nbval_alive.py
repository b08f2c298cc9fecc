"""A pytest plugin: nbval notices within a second that a kernel died, and compares figures.

A kernel that never answers is started once more, as the book's own runs do: two that start at once
can draw the same port. A stored figure is one that the cell draws if they have one size and all but
`PIXELS` of its pixels: sums on another processor may move a line by a hair.

Used as ``pytest --nbval -p tests.pipeline.nbval_alive``.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterable
from queue import Empty
from typing import Any

import nbval.kernel
import numpy as np
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell
from PIL import Image

POLL_SECONDS = 1.0
#: Share of a figure's pixels that may differ by more than `SHADES` of 256.
PIXELS, SHADES = 0.002, 48
_get_message = RunningKernel.get_message
_start_new_kernel = nbval.kernel.start_new_kernel


def start_new_kernel(*args: Any, **options: Any) -> Any:
    """Manager and client of a kernel that answers."""
    try:
        return _start_new_kernel(*args, **options)
    except RuntimeError:
        return _start_new_kernel(*args, **options)


def get_message(self: RunningKernel, stream: str, timeout: float | None = None) -> Any:
    """The next message; raises RuntimeError once there can be none."""
    deadline = float("inf") if timeout is None else time.monotonic() + float(timeout)
    while True:
        remaining = deadline - time.monotonic()
        try:
            return _get_message(self, stream, timeout=max(0.0, min(POLL_SECONDS, remaining)))
        except Empty:
            if not self.is_alive():
                raise RuntimeError("the kernel died in this cell") from None
            if remaining <= POLL_SECONDS:
                raise


def compare_outputs(self: IPyNbCell, test: list[Any], ref: list[Any], *skipped: Any) -> bool:
    """nbval's comparison of texts, then the figures."""
    if not _compare_texts(self, test, ref, *skipped):
        return False
    drawn, stored = _figures(test), _figures(ref)
    alike = len(drawn) == len(stored) and all(map(same_figure, drawn, stored))
    if not alike:
        self.comparison_traceback.append("a stored figure is not the one that this cell draws")
    return alike


def _figures(outputs: Iterable[Any]) -> list[str]:
    found = (output.get("data", {}).get("image/png") for output in outputs)
    return [image for image in found if image is not None]


def same_figure(one: str, other: str) -> bool:
    """Whether two PNGs, in base64, show the same but for a hair."""
    pictures = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(each))).convert("RGBA"), dtype=int)
        for each in (one, other)
    ]
    if pictures[0].shape != pictures[1].shape:
        return False
    differing = np.abs(pictures[0] - pictures[1]).max(axis=-1) > SHADES
    return bool(differing.mean() <= PIXELS)


_compare_texts = IPyNbCell.compare_outputs
IPyNbCell.compare_outputs = compare_outputs
RunningKernel.get_message = get_message
nbval.kernel.start_new_kernel = start_new_kernel
