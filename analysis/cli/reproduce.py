"""``analysis reproduce``: whether the recorded results come out again, digit by digit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import tyro

from analysis.records.manifests import manifest_of
from analysis.sweeps.reproduction import find
from analysis.sweeps.reproduction import reproduce as reproduced
from analysis.training.pretrained.folders import Unavailable
from kl_term.errors import UserError


def reproduce(
    recordings: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[RECORDING ...]")
    ] = (),
    /,
    runs: int | None = None,
    updates: int | None = None,
    beside: Path | None = None,
    curves: Path | None = None,
    note: bool = False,
) -> None:
    """Train runs of recorded populations again and compare every digit.

    Prints one line a recording and ends with a non-zero status if any digit differs. Trains on one
    thread, as the recordings were.

    Args:
        recordings: folders in results/, by name, or elsewhere, by path; by default all recorded
            presets whose packages are installed, but those of a GPU.
        runs: how many of each; by default each variant once, with the seeds in turn.
        updates: how many of each run; by default all.
        beside: another checkout of this project, which trains the same runs on this machine; its
            digits are compared with, for a processor on which no code gives the recorded ones.
        curves: a CSV file to write the curves trained now to; of one recording.
        note: write into the manifest of each recording that agrees how many of its runs did; of
            whole runs, against the recording.
    """
    torch.set_num_threads(1)
    explanations = []
    try:
        folders = find(recordings)
        if curves is not None and len(folders) != 1:
            raise UserError("--curves is of one recording: name it")
        if note and (updates is not None or beside is not None):
            raise UserError("--note is of whole runs against the recording: leave out the others")
        for folder in folders:
            if not recordings and manifest_of(folder)["device"].startswith("cuda"):
                print(f"{folder.name}: skipped, recorded on a GPU", flush=True)
                continue
            try:
                found = reproduced(
                    folder, runs=runs, updates=updates, beside=beside, progress=sys.stderr.isatty()
                )
            except Unavailable as missing:
                if recordings:
                    raise UserError(f"{folder.name} cannot be trained here: {missing}") from None
                print(f"{folder.name}: skipped, {missing}", flush=True)
                continue
            if curves is not None:
                found.curves.to_csv(curves, index=False)
            if found.agrees and note:
                found.note()
            if not found.agrees:
                explanations.append(found.explanation)
            print(found.summary, flush=True)
    except ValueError as error:
        raise UserError(str(error)) from None
    if explanations:
        raise UserError("\n".join(explanations))
