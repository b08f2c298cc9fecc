"""``analysis reproduce``: whether the recorded results come out again, digit by digit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import tyro

from analysis.errors import Refused
from analysis.experiments.ablations import reproduction
from analysis.experiments.language_models.checkpoints import Unavailable


def reproduce(
    recordings: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[RECORDING ...]")
    ] = (),
    /,
    members: int | None = None,
    beside: Path | None = None,
    seal: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Train members of recorded populations again, in full, and compare every digit.

    Prints one line a recording and ends with a non-zero status if any digit differs. Trains on one
    thread, as the recordings were.

    Args:
        recordings: folders in results/, by name, or elsewhere, by path; by default all recorded
            presets whose packages are installed.
        members: how many of each; by default each arm once, with the seeds in turn.
        beside: another checkout of this project, of a source that the recording lists: its digits
            on this machine are compared with, for a processor on which no code gives the recorded
            ones.
        seal: write into the manifest of a recording that agrees that the code as it is now gives
            its digits. Its tables stay as they are.
    """
    torch.set_num_threads(1)
    departures = []
    try:
        for folder in reproduction.find(recordings):
            try:
                found = reproduction.reproduce(
                    folder, members=members, beside=beside, progress=sys.stderr.isatty()
                )
            except Unavailable as missing:
                if recordings:
                    raise Refused(f"{folder.name} cannot be trained here: {missing}") from None
                print(f"{folder.name}: skipped, {missing}", flush=True)
                continue
            said = found.summary
            if not found.agrees:
                departures.append(found.explanation)
            elif seal:
                said += (
                    "; sealed" if reproduction.seal(found) else "; this source is listed already"
                )
            print(said, flush=True)
    except ValueError as error:
        raise Refused(str(error)) from None
    if departures:
        raise Refused("\n".join(departures))
