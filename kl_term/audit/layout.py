"""The shapes and types that a function wants."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

#: Marks padding where a function asks for the id of it: none of a token. What ignores labels has
#: its own, usually -100.
PAD = -1
IGNORED = -100


class Alignment(NamedTuple):
    """Roles that have one position more than the answer: the prompt's last token, or the end."""

    before: tuple[str, ...] = ()  #: of a token: that of the prompt stands before them
    after: tuple[str, ...] = ()  #: of the next token: the last predicts nothing


class Layout(NamedTuple):
    """The shapes and types that a function wants."""

    packed: bool = False  #: tokens of all answers in one row, without padding
    listed: bool = False  #: cut into a list of one row an answer
    rows: bool = False  #: what holds a batch is a list of one an answer
    one_row: bool = False  #: packed, and with a first axis of length one
    marked: int | None = None  #: what tokens are where nothing is counted
    #: Lengths of answers: ``counted``, the ``width`` of rows that are padded, or ``whole`` with the
    #: one token of the prompt.
    lengths: Literal["counted", "width", "whole"] = "counted"
    plain: bool = False  #: lengths are a list of numbers
    #: ``row`` [B], ``column`` [B, 1] or ``token`` [B, T]; packed: ``column`` is [B].
    advantages: str = "row"
    mask: torch.dtype = torch.bool
    floats: torch.dtype = torch.float64
    prompted: Alignment = Alignment()


#: In this order they are tried; the first that a function can be called with is used.
LAYOUTS = tuple(
    Layout(advantages=advantages, mask=mask, floats=floats)
    for floats in (torch.float64, torch.float32)
    for mask in (torch.bool, torch.float64, torch.long)
    for advantages in ("row", "token", "column")
)
