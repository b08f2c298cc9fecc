"""The layouts in which a foreign function is called, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kl_term.audit.alignment import BY_LOGITS, SHORTER
from kl_term.audit.arguments import ignored_of
from kl_term.audit.calling import Foreign
from kl_term.audit.layout import LAYOUTS, PAD, Alignment, Layout
from kl_term.audit.listing import takes_lists, takes_numbers, takes_rows
from kl_term.audit.spellings import OF_LENGTHS


def layouts_to_try(foreign: Foreign) -> Iterator[Layout]:
    """In the order in which they are tried."""
    packed = bool(foreign.roles & {"cu_seqlens", "sequence_ids"})
    masked = bool(foreign.roles & {"mask", "padding"})
    packs: tuple[bool, ...] = (packed,)
    if "position_ids" in foreign.roles and not packed:
        packs = (False, True) if masked else (True,)
    before: tuple[Alignment, ...] = ()
    if not any(packs):
        before = BY_LOGITS if foreign.by_logits else SHORTER
    shapes = [Layout(packed=p) for p in packs]
    shapes += [Layout(prompted=alignment) for alignment in before]
    shapes += [Layout(packed=True, one_row=True)] if any(packs) else []
    if "lengths" in foreign.reads and not any(packs):
        shapes.append(Layout(packed=True))
    rows = [Layout(packed=True, listed=True, rows=True)] if "inputs" in foreign.roles else []
    lists = [Layout(packed=True, listed=True), *padded_lists(foreign)]
    shapes = lists + shapes if takes_lists(foreign.function) else shapes + lists
    shapes = rows + shapes if takes_rows(foreign.function) else shapes + rows
    for shape in shapes:  # packed, one advantage an answer fits nothing else
        for layout in sorted(LAYOUTS, key=lambda of: shape.packed and of.advantages != "column"):
            types = {name: getattr(layout, name) for name in ("advantages", "mask", "floats")}
            for marked in _markers(foreign):
                for plain in _numbers(foreign, shape):
                    yield shape._replace(marked=marked, plain=plain, **types)


def padded_lists(foreign: Foreign) -> list[Layout]:
    """Lists of rows that are padded alike, where something says what is counted."""
    if not foreign.reads & {"mask", "padding", *OF_LENGTHS, "inputs"}:
        return []
    return [Layout(listed=True), Layout(listed=True, lengths="width")]


def _markers(foreign: Foreign) -> tuple[int | None, ...]:
    """What tokens are at the padding: what a function asks the id of, or ignores."""
    marker = PAD if "pad_id" in foreign.reads else ignored_of(foreign.function)
    return (None,) if marker is None else (marker, None)


def _numbers(foreign: Foreign, shape: Layout) -> tuple[bool, ...]:
    """Whether lengths are numbers in a list."""
    if not foreign.reads & {*OF_LENGTHS, "inputs"}:
        return (False,)
    first = shape.listed or takes_numbers(foreign.function)
    return (first, not first)


def relevant_of(layout: Layout, held: set[str]) -> Layout:
    """What of a layout a function with these arguments can see."""
    if not held & {"mask", "padding", "inputs"}:
        layout = layout._replace(mask=torch.bool)
    if not held & {"tokens", "inputs"}:
        layout = layout._replace(marked=None)
    if not held & {"advantages", "inputs"}:
        layout = layout._replace(advantages="row")
    return layout
