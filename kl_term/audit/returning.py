"""The loss in what a foreign function returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kl_term.errors import UserError


def first_of(returned: Any, name: str, *, packed: bool) -> Tensor:
    """A tensor, or the first of a tuple, or ``.loss``, or a list with an entry for each answer.

    Args:
        returned: by the function.
        name: of the function.
        packed: lists hold answers without padding, which are joined end to end.
    """
    found = returned
    if isinstance(found, Mapping):
        found = found.get("loss", next(iter(found.values()), None))
    elif isinstance(found, tuple) and found:
        found = getattr(found, "loss", found[0])
    elif not isinstance(found, (Tensor, list)) and hasattr(found, "loss"):
        found = found.loss
    if isinstance(found, list):
        found = _joined(found, packed)
    if not isinstance(found, Tensor):
        what = "nothing" if found is None else f"a {type(found).__name__}"
        raise UserError(f"{name}: returns {what}, no tensor to differentiate")
    if not found.is_floating_point():
        raise UserError(f"{name}: returns integers ({found.dtype}), which have no gradient")
    return found


def _joined(entries: list[Any], packed: bool) -> Any:
    """One tensor of a list with a number, or a row of tokens, for each answer; else the list."""
    if not entries or not all(isinstance(entry, Tensor) for entry in entries):
        return entries
    if packed and entries[0].ndim == 1:
        return torch.cat(entries)
    return torch.stack(entries) if len({entry.shape for entry in entries}) == 1 else entries
