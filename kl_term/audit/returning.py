"""The loss in what a foreign function returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kl_term.errors import UserError

#: Where a part lies in a tuple, or its name in a dictionary or an object.
Key = int | str


class Parts(NamedTuple):
    """What of a result is trained on: the loss, and beside it a KL that the caller multiplies."""

    loss: Key
    kl: Key | None = None


def loss_of(
    returned: Any, name: str, *, packed: bool, parts: Parts | None = None, beta: float = 1.0
) -> Tensor:
    """A tensor, or the first of a tuple, or ``.loss``, or a list with an entry for each answer.

    Args:
        returned: by the function.
        name: of the function.
        packed: lists hold answers without padding, which are joined end to end.
        parts: which entries are meant, where not the first.
        beta: what the caller multiplies the KL beside the loss by.
    """
    if parts is None:
        return _tensor(_first(returned), name, packed)
    entries = entries_of(returned)
    found = _tensor(entries.get(parts.loss), name, packed)
    if parts.kl is None:
        return found
    return found + beta * _tensor(entries.get(parts.kl), name, packed)


def entries_of(returned: Any) -> dict[Key, Any]:
    """What a function returned beside each other, where it does not say which is the loss."""
    if isinstance(returned, Mapping):
        return {} if "loss" in returned else {str(k): value for k, value in returned.items()}
    if hasattr(returned, "loss") or isinstance(returned, (Tensor, list)):
        return {}
    if hasattr(returned, "_asdict"):
        return dict(returned._asdict())
    if isinstance(returned, tuple):
        return dict(enumerate(returned))
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        return {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}
    return {}


def tensors_of(returned: Any, *, packed: bool) -> dict[Key, Tensor]:
    """The entries that are tensors in the shape of the first."""
    joined = {key: _as_tensor(entry, packed) for key, entry in entries_of(returned).items()}
    first = next(iter(joined.values()), None)
    if not isinstance(first, Tensor):
        return {}
    return {
        key: entry
        for key, entry in joined.items()
        if isinstance(entry, Tensor) and entry.is_floating_point() and entry.shape == first.shape
    }


def _first(returned: Any) -> Any:
    if isinstance(returned, Mapping):
        return returned.get("loss", next(iter(returned.values()), None))
    if isinstance(returned, tuple) and returned:
        return getattr(returned, "loss", returned[0])
    if not isinstance(returned, (Tensor, list)) and hasattr(returned, "loss"):
        return returned.loss
    return next(iter(entries_of(returned).values()), returned)


def _tensor(found: Any, name: str, packed: bool) -> Tensor:
    found = _as_tensor(found, packed)
    if not isinstance(found, Tensor):
        what = "nothing" if found is None else f"a {type(found).__name__}"
        raise UserError(f"{name}: returns {what}, no tensor to differentiate")
    if not found.is_floating_point():
        raise UserError(f"{name}: returns integers ({found.dtype}), which have no gradient")
    return found


def _as_tensor(found: Any, packed: bool) -> Any:
    """One tensor of a list with a number, or a row of tokens, for each answer; else what it is."""
    if not isinstance(found, list) or not found or not all(isinstance(e, Tensor) for e in found):
        return found
    if packed and found[0].ndim == 1:
        return torch.cat(found)
    return torch.stack(found) if len({entry.shape for entry in found}) == 1 else found
