"""Dumps of one's own loop: padded tensors as ``.npz``, or as ``.pt`` with nothing but tensors."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from kl_term.diagnosis.budgets import check_archive, check_rows
from kl_term.diagnosis.columns import assemble
from kl_term.diagnosis.names import ENDS, NAMES, canonical, is_known
from kl_term.diagnosis.schema import Rollouts
from kl_term.errors import UserError

TENSORS = (".npz", ".pt")
ONLY_TENSORS = "holds more than tensors by name, torch.save({name: tensor})"


def read_tensors(path: Path) -> Rollouts:
    """The rollouts of a file that holds tensors by name: [B, T], [B], [B, 1], or one value of all.

    Each row is a completion, unless a column of sequences or ``cu_seqlens`` says otherwise; padding
    is told by a mask. Arrays of one axis throughout are read as a table, a row a token.

    Raises:
        UserError: no such tensors, or of shapes that do not go together.
    """
    arrays = _cut({str(name): value for name, value in _load(path).items()}, path)
    own = (
        [] if {"sequence", *NAMES["sequence"]} & {name.lower() for name in arrays} else ["sequence"]
    )
    try:
        named, _ = canonical([*arrays, *own])
    except UserError as refusal:
        raise UserError(f"{path}: {refusal}") from None
    shape = arrays[named["logp"]].shape
    check_rows(int(np.prod(shape)), str(path))
    if len(shape) == 1:
        return assemble(arrays, str(path))
    if len(shape) != 2:
        raise UserError(f"{path}: {named['logp']} has shape {shape}: [batch, tokens] was expected")
    table: dict[str, Any] = {}
    if "sequence" in own:
        table["sequence"] = np.repeat(np.arange(shape[0]), shape[1])
    if "position" not in named:
        table["position"] = np.tile(np.arange(shape[1]), shape[0])
    for name, values in arrays.items():
        if not is_known(name):
            table[name] = None  # is named in the report, and not read
            continue
        if values.shape not in (shape, shape[:1], (shape[0], 1), ()):
            raise UserError(
                f"{path}: {name} has shape {values.shape}: {shape}, or {shape[:1]}, was expected"
            )
        spread = values[:, None] if values.ndim == 1 else values
        table[name] = np.broadcast_to(spread, shape).ravel()
    width = shape[1]
    return assemble(
        table, str(path), lambda row: f"row {row // width + 1}, token {row % width + 1}"
    )


def _cut(arrays: dict[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """Tensors of packed rows, [N] or [1, N], with the sequence of each token for ``cu_seqlens``."""
    ends = next((name for name in arrays if name.lower() in ENDS), None)
    if ends is None:
        return arrays
    cuts = arrays.pop(ends).astype(np.int64).ravel()
    lengths = np.diff(cuts)
    sizes = {value.size for value in arrays.values() if value.ndim}
    if not len(cuts) or cuts[0] != 0 or (lengths < 0).any() or sizes != {int(cuts[-1])}:
        raise UserError(
            f"{path}: {ends} must rise from 0 to the number of tokens, one value a token in every "
            f"tensor: it ends at {cuts[-1] if len(cuts) else 'nothing'}, and they hold "
            f"{', '.join(map(str, sorted(sizes)))}"
        )
    flat = {
        n: np.broadcast_to(v, cuts[-1:]) if not v.ndim else v.ravel() for n, v in arrays.items()
    }
    return flat | {"sequence": np.repeat(np.arange(len(lengths)), lengths)}


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        check_archive(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if path.suffix.lower() == ".npz":
        try:
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except (OSError, ValueError, MemoryError, zipfile.BadZipFile) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            said = first[:200]  # zipfile quotes the file
            raise UserError(f"{path}: cannot be read ({said})") from None
    import torch

    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # torch's own advice is to run what the file says
        raise UserError(f"{path}: cannot be read: {ONLY_TENSORS}") from None
    if not isinstance(held, dict) or not all(isinstance(v, torch.Tensor) for v in held.values()):
        raise UserError(f"{path}: {ONLY_TENSORS}")
    return {
        name: (value.double() if value.is_floating_point() else value).detach().numpy()
        for name, value in held.items()
    }
