"""Recorded runs trained again, and every number compared with the recorded one.

The same operations in the same order give the same digits. On another make of processor than the
recording's no code gives its digits; there the code is compared with another checkout of this
project, which trains the same runs on this machine.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.records import recording
from analysis.records.config import Run
from analysis.records.manifests import (
    MANIFEST,
    as_written,
    manifest_of,
    note_reproduced,
    read_table,
)
from analysis.records.metrics import FINAL_METRICS, FINAL_PROXY_METRICS, POLICY_METRICS
from analysis.records.preset import Preset
from analysis.records.tidy import measured
from analysis.sweeps.in_process import train
from analysis.sweeps.provenance import current_provenance
from analysis.sweeps.record import ended, tidy
from analysis.training.environment_of import environment_of
from kl_term.plain_checks import check_choice

#: Of the largest recorded value of a run's metric. Sums taken in another order stay below it
#: until they flip a sampled token.
ROUNDING = 1e-3
#: A metric this small is rounding, whatever the largest recorded: a policy's KL from itself is
#: exactly zero on one processor and a few 1e-9 on another.
NOTHING = 1e-6
#: The same of the policy at update 0 on another processor, whose rounding has trained another start
#: and another teacher: a KL between them was seen to change by 0.03.
TRAINED_ELSEWHERE = 0.1


class Reproduction(NamedTuple):
    """Runs of a recording, trained again."""

    directory: Path
    runs: tuple[Run, ...]
    updates: int
    curves: pd.DataFrame  #: as trained now, with the digits that would be recorded
    mismatches: pd.DataFrame  #: see :func:`mismatches`
    recorded_on: str  #: device and versions
    here: str
    seconds: float

    @property
    def agrees(self) -> bool:
        """Whether every digit does."""
        return self.mismatches.empty

    @property
    def summary(self) -> str:
        """One line: how many runs agree, and where the first that does not parts."""
        count = len(self.runs)
        agreeing = count - len(self.mismatches.drop_duplicates(["variant", "beta", "seed"]))
        said = (
            f"{self.directory.name}: {agreeing} of {count} runs agree to every digit of "
            f"{self.updates} updates ({self.seconds:.0f} s)"
        )
        return said if self.agrees else f"{said}; {first_mismatch(self.mismatches)}"

    def note(self) -> None:
        """Say in the manifest that these runs came out again."""
        config = recording.load(self.directory).preset.config
        note_reproduced(self.directory, current_provenance(config).model_dump(), len(self.runs))

    @property
    def explanation(self) -> str:
        """One sentence: what the mismatches mean. Empty where there are none."""
        if self.agrees:
            return ""
        return f"{self.directory.name} {meaning(self.mismatches, self.recorded_on, self.here)}"


def find(names: Sequence[str] = ()) -> list[Path]:
    """The folders of recorded populations, by name or path; without names, all in ``results``.

    Raises:
        ValueError: there is none of that name, or it holds no population.
    """
    folders = sorted(manifest.parent for manifest in recording.RESULTS.glob(f"*/{MANIFEST}"))
    recorded = [folder for folder in folders if _is_population(folder)]
    if not names and not recorded:
        raise ValueError(f"{recording.RESULTS} holds no recorded population: name a folder")
    return [_find(name, recorded) for name in names] if names else recorded


def _find(name: str, recorded: Sequence[Path]) -> Path:
    places = [p for p in (recording.RESULTS / name, Path(name)) if (p / MANIFEST).is_file()]
    if not places:
        check_choice("recording", name, [folder.name for folder in recorded])
    if not _is_population(places[0]):
        raise ValueError(f"{name} holds no trained population: it has no curves.csv")
    return places[0]


def _is_population(folder: Path) -> bool:
    return "curves.csv" in manifest_of(folder)["files"]


def chosen(preset: Preset, count: int | None = None) -> tuple[Run, ...]:
    """Runs to train again: each variant once, the seeds in turn; or so many, spread over them.

    Beyond the number of variants, each variant comes again with its next seed, until all runs are
    in.

    Raises:
        ValueError: ``count`` is below one.
    """
    variants, seeds, size = preset.variants, preset.seeds, len(preset.variants)
    count = size if count is None else count
    if count < 1:
        raise ValueError(f"runs must be at least 1, not {count}")
    golden = max(1, round(0.618 * size))  # a step near it leaves no part of the variants long unmet
    stride = next(step for step in range(golden, 0, -1) if math.gcd(step, size) == 1)
    places = [stride * i % size for i in range(size)]
    turns = [(i, seeds[(i + turn) % len(seeds)]) for turn in range(len(seeds)) for i in places]
    wanted = {(variants[i], seed) for i, seed in turns[:count]}
    return tuple(run for run in preset.runs if (run.variant, run.seed) in wanted)


def reproduce(
    directory: Path,
    *,
    runs: int | None = None,
    updates: int | None = None,
    beside: Path | None = None,
    progress: bool = False,
) -> Reproduction:
    """Train runs of a recording again and compare every number as written.

    Args:
        directory: of the recording.
        runs: how many; by default each variant once, see :func:`chosen`.
        updates: of each run, rounded up to whole logging windows; by default all.
        beside: another checkout, to be compared with in place of the recording.
        progress: show a bar.

    Raises:
        Unavailable: a model or an optional package cannot be had.
        ValueError: the recording is damaged or no longer understood, a number is below one, or the
            other checkout cannot train it.
    """
    started = time.monotonic()
    recorded = recording.load(directory)
    again = chosen(recorded.preset, runs)
    config = recorded.preset.config
    if updates is not None:
        if updates < 1:
            raise ValueError(f"updates must be at least 1, not {updates}")
        whole = math.ceil(updates / config.log_every) * config.log_every
        config = config.model_copy(update={"updates": min(whole, config.updates)})
    here = _place(current_provenance(config).model_dump())
    known, recorded_on = recorded.curves, _place(recorded.manifest)
    if beside is not None:
        known, recorded_on = _trained_in(beside, directory, len(again), config.updates), here
    records = train(config, again, environment_of(config), progress=progress)
    curves = as_written(pd.concat([tidy(record) for record in records], ignore_index=True))
    both = recording.compared(known, curves, measured(curves))
    if beside is None and config == recorded.preset.config and config.final_answers:
        ends = as_written(pd.concat([ended(record) for record in records], ignore_index=True))
        tables = (table.assign(update=config.updates) for table in (recorded.finals, ends))
        names = [name for name in (*FINAL_METRICS, *FINAL_PROXY_METRICS) if name in ends]
        both = pd.concat([both, recording.compared(*tables, names)], ignore_index=True)
    return Reproduction(
        directory=directory,
        runs=again,
        updates=config.updates,
        curves=curves,
        mismatches=mismatches(both),
        recorded_on=recorded_on,
        here=here,
        seconds=time.monotonic() - started,
    )


def mismatches(both: pd.DataFrame) -> pd.DataFrame:
    """The rows of :func:`analysis.records.recording.compared` that differ, earliest first.

    Their ``size`` is the difference over the metric's largest recorded value of that run, or over
    ``NOTHING`` if that is smaller; infinite where only one is a number.
    """
    run = both.groupby(["variant", "beta", "seed", "metric"], sort=False)["recorded"]
    largest = run.transform(lambda values: values.abs().max()).clip(lower=NOTHING)
    with np.errstate(divide="ignore", invalid="ignore"):
        size = (both["difference"] / largest).fillna(math.inf)
    rows = both.assign(size=size)[both["recorded"] != both["again"]]
    return rows.sort_values("update", kind="stable").reset_index(drop=True)


def first_mismatch(rows: pd.DataFrame) -> str:
    """The first of :func:`mismatches`, in words; one beyond rounding where there is any."""
    beyond = rows[rows["size"] > ROUNDING]
    kept = rows if beyond.empty else beyond
    earliest = kept[kept["update"] == kept["update"].iloc[0]]
    row = earliest.loc[earliest["size"].idxmax()]
    how = "differs in its last digits" if beyond.empty else "is the first to part,"
    return (
        f"{row['variant']} beta={row['beta']:g} seed={row['seed']} {how} in the window from update "
        f"{row['update']} on: {row['metric']} {row['recorded']:.6g} recorded, "
        f"{row['again']:.6g} here, off by {row['difference']:.2g}"
    )


def meaning(rows: pd.DataFrame, recorded_on: str, here: str) -> str:
    """What :func:`mismatches` mean, as the end of a sentence about the recording.

    What is measured of the policy at update 0 can differ by rounding only, which on another machine
    has grown while the start was trained. Later it is the machine that tells whether rounding may
    be the reason.
    """
    allowed = ROUNDING if here == recorded_on else TRAINED_ELSEWHERE
    start = rows[(rows["update"] == 0) & (rows["size"] > allowed)]
    if start["metric"].isin(POLICY_METRICS).any():
        return (
            "differs already at update 0, by more than rounding: the code here computes something "
            "else"
        )
    if here == recorded_on:
        return (
            f"was recorded on such a machine with these versions ({here}): most likely the code "
            "here computes something else"
        )
    return (
        f"was recorded elsewhere ({recorded_on}; here {here}): sums differ in the last bit, so the "
        "start comes out slightly different, and from the first update at which that flips a "
        "sampled token the runs part"
    )


def _place(provenance: Mapping[str, Any]) -> str:
    """Device and versions, in words."""
    versions = sorted(provenance["versions"].items())
    return ", ".join([provenance["device"], *(f"{name} {version}" for name, version in versions)])


def _trained_in(checkout: Path, directory: Path, runs: int, updates: int) -> pd.DataFrame:
    """Curves of the same runs by the code of another checkout, through its own command."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "curves.csv"
        options = ["--runs", str(runs), "--updates", str(updates), "--curves", str(target)]
        done = subprocess.run(
            [sys.executable, "-m", "analysis", "reproduce", directory.name, *options],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout.resolve())},
            capture_output=True,
            text=True,
            check=False,
        )
        if not target.is_file():  # it may differ from what is recorded there: that is no failure
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            raise ValueError(f"{checkout} did not train {directory.name}: {last}")
        return read_table(target)
