"""Recorded members trained again in full, and compared digit by digit with what was recorded.

The same operations in the same order give the same digits. A change of the code that keeps them
all can be sealed: the recording then also counts as one of the code as it is now. On another make
of processor than the recording's no code gives its digits; there the code is compared with an
earlier one, in a checkout beside this, which the recording counts as its own.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from analysis.checks import check_choice
from analysis.experiments.ablations import recording
from analysis.experiments.ablations.ablation import tidy, train
from analysis.experiments.ablations.departures import differing, first_departure, meaning, place
from analysis.experiments.ablations.folders import (
    MANIFEST,
    amend_manifest,
    as_written,
    manifest_of,
    read_manifest,
    read_table,
)
from analysis.experiments.ablations.presets import Preset
from analysis.experiments.ablations.settings import setting_of
from analysis.experiments.ablations.stamp import Stamp, current_stamp
from analysis.training.config import Member


class Reproduction(NamedTuple):
    """Members of a recording, trained again."""

    directory: Path
    members: tuple[Member, ...]
    updates: int
    differing: pd.DataFrame  #: see :func:`~analysis.experiments.ablations.departures.differing`
    recorded_on: str  #: device and versions
    stamp: Stamp
    seconds: float
    beside: str | None = None  #: the source that it was compared with, if not with the recording

    @property
    def agrees(self) -> bool:
        """Whether every digit does."""
        return self.differing.empty

    @property
    def summary(self) -> str:
        """One line: how many members agree, and where the first that does not parts."""
        count = len(self.members)
        agreeing = count - len(self.differing.drop_duplicates(["arm", "beta", "seed"]))
        said = (
            f"{self.directory.name}: {agreeing} of {count} members agree to every digit of "
            f"{self.updates} updates ({self.seconds:.0f} s)"
        )
        return said if self.agrees else f"{said}; {first_departure(self.differing)}"

    @property
    def explanation(self) -> str:
        """One sentence: what the differences mean. Empty where there are none."""
        if self.agrees:
            return ""
        here = place(self.stamp.model_dump())
        return f"{self.directory.name} {meaning(self.differing, self.recorded_on, here)}"


def find(names: Sequence[str] = ()) -> list[Path]:
    """The folders of recorded populations, by name or path; without names, all in ``results``.

    Raises:
        ValueError: there is none of that name, or it holds no population.
    """
    folders = sorted(manifest.parent for manifest in recording.RESULTS.glob(f"*/{MANIFEST}"))
    recorded = [folder for folder in folders if _of_population(folder)]
    if not names and not recorded:
        raise ValueError(f"{recording.RESULTS} holds no recorded population: name a folder")
    return [_find(name, recorded) for name in names] if names else recorded


def _find(name: str, recorded: Sequence[Path]) -> Path:
    places = [p for p in (recording.RESULTS / name, Path(name)) if (p / MANIFEST).is_file()]
    if not places:
        check_choice("recording", name, [folder.name for folder in recorded])
    if not _of_population(places[0]):
        raise ValueError(f"{name} holds no trained population: it has no curves.csv")
    return places[0]


def _of_population(folder: Path) -> bool:
    return "curves.csv" in manifest_of(folder)["files"]


def chosen(preset: Preset, count: int | None = None) -> tuple[Member, ...]:
    """Members to train again: each arm once, the seeds in turn; or so many, spread over the arms.

    Beyond the number of arms, each arm comes again with its next seed, until all members are in.

    Raises:
        ValueError: ``count`` is below one.
    """
    arms, seeds, size = preset.arms, preset.seeds, len(preset.arms)
    count = size if count is None else count
    if count < 1:
        raise ValueError(f"members must be at least 1, not {count}")
    golden = max(1, round(0.618 * size))  # a step near it leaves no part of the arms long unmet
    stride = next(step for step in range(golden, 0, -1) if math.gcd(step, size) == 1)
    places = [stride * i % size for i in range(size)]
    turns = [(i, seeds[(i + turn) % len(seeds)]) for turn in range(len(seeds)) for i in places]
    wanted = {(arms[i], seed) for i, seed in turns[:count]}
    return tuple(member for member in preset.members if (member.arm, member.seed) in wanted)


def reproduce(
    directory: Path,
    *,
    members: int | None = None,
    beside: Path | None = None,
    progress: bool = False,
) -> Reproduction:
    """Train members of a recording again, over all updates, and compare every number as written.

    Args:
        directory: of the recording.
        members: how many; by default each arm once, see :func:`chosen`.
        beside: a checkout with a source of the recording, to be compared with in its place.
        progress: show a bar.

    Raises:
        Unavailable: a model or an optional package cannot be had.
        ValueError: the recording is damaged or no longer understood, ``members`` is below one, or
            the other checkout cannot train it or is of no source of the recording.
    """
    started = time.monotonic()
    recorded = recording.load(directory)
    config = recorded.preset.config
    again = chosen(recorded.preset, members)
    stamp = current_stamp(config)
    known, source = recorded.curves, None
    if beside is not None:
        known, source = _trained_in(beside, directory.name, members)
        if source not in recorded.sources:
            raise ValueError(f"{beside} is of no source that {directory.name} lists")
    both = recording.compared(known, curves_of(recorded.preset, again, progress=progress))
    return Reproduction(
        directory=directory,
        members=again,
        updates=config.updates,
        differing=differing(both),
        recorded_on=place(recorded.manifest if source is None else stamp.model_dump()),
        stamp=stamp,
        seconds=time.monotonic() - started,
        beside=source,
    )


def curves_of(preset: Preset, members: Sequence[Member], *, progress: bool = False) -> pd.DataFrame:
    """Tidy curves of members trained now, as they would be recorded."""
    records = train(preset.config, members, setting_of(preset.config), progress=progress)
    return as_written(pd.concat([tidy(record) for record in records], ignore_index=True))


#: Run by the other checkout, in its own words: these names are as old as sealing is.
_TRAIN = """
import json, sys
import pandas as pd, torch
from analysis.experiments.ablations import recording, reproduction
from analysis.experiments.ablations.ablation import tidy, train
from analysis.experiments.ablations.settings import setting_of
from analysis.experiments.ablations.source import source_of

torch.set_num_threads(1)
name, members, target = json.loads(sys.argv[1])
preset = recording.load(recording.RESULTS / name).preset
records = train(preset.config, reproduction.chosen(preset, members), setting_of(preset.config))
pd.concat([tidy(record) for record in records], ignore_index=True).to_csv(
    target, index=False, float_format="%.6g"
)
print(source_of(preset.config))
"""


def _trained_in(checkout: Path, name: str, members: int | None) -> tuple[pd.DataFrame, str]:
    """Curves of the same members by the code of another checkout, and the hash of its source."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "curves.csv"
        order = json.dumps([name, members, str(target)])
        done = subprocess.run(
            [sys.executable, "-c", _TRAIN, order],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout.resolve())},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            raise ValueError(f"{checkout} did not train {name}: {last}")
        return read_table(target), done.stdout.split()[-1]


def seal(reproduction: Reproduction) -> bool:
    """Write into the manifest that the source as it is now gives the recorded digits.

    A source is listed once, with the most members it was tried on; the one that recorded is not.

    Returns:
        Whether the manifest has changed.

    Raises:
        ValueError: a digit differs, or the recording is damaged.
    """
    if not reproduction.agrees:
        raise ValueError(f"{reproduction.summary}: not sealed")
    manifest, stamp = read_manifest(reproduction.directory), reproduction.stamp
    entries: list[dict[str, Any]] = manifest.get("reproduced", [])
    known = [entry for entry in entries if entry["source"] == stamp.source]
    tried = max((len(entry["members"]) for entry in known), default=0)
    if stamp.source == manifest["source"] or tried >= len(reproduction.members):
        return False
    entry = {
        **stamp.model_dump(),
        "updates": reproduction.updates,
        "members": [
            {"arm": m.arm.name, "beta": m.arm.beta, "seed": m.seed} for m in reproduction.members
        ],
        **({} if reproduction.beside is None else {"beside": reproduction.beside}),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    kept = [entry for entry in entries if entry["source"] != stamp.source]
    amend_manifest(reproduction.directory, {"reproduced": [*kept, entry]})
    return True
