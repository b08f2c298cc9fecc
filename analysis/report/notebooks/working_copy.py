"""Papermill's copy of a notebook that it runs, which it saves at every cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def cells_of(output: Path) -> list[dict[str, Any]]:
    """The notebook's own cells in papermill's working copy, as far as it is whole."""
    try:
        cells = json.loads(output.read_bytes())["cells"]
    except (OSError, ValueError, KeyError):
        return []
    added = {"injected-parameters", "papermill-error-cell-tag"}
    return [cell for cell in cells if added.isdisjoint(cell["metadata"].get("tags", ()))]


def last_started(cells: list[dict[str, Any]]) -> int:
    """The last cell that papermill has started; -1 for none."""
    times = [cell["metadata"].get("papermill", {}).get("start_time") for cell in cells]
    return max((index for index, time in enumerate(times) if time), default=-1)


def where(output: Path) -> str:
    """The cell that ran last, as a person counts them."""
    cells = cells_of(output)
    index = last_started(cells)
    return "the start of the kernel" if index < 0 else cell_label(cells, index)


def cell_label(cells: list[dict[str, Any]], index: int) -> str:
    first, *_ = "".join(cells[index]["source"]).strip().splitlines() or [""]
    return f"cell {index + 1} (`{first[:80]}`)"
