"""The benchmark: every contender takes a turn in every round; what counts is compared by round."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from pydantic import Field, ValidationError, field_validator

from analysis.experiments.ablations.stamp import Stamp, current_stamp
from analysis.experiments.benchmark.contenders import (
    LARGEST,
    Contender,
    Crew,
    of_width,
    trl_version,
)
from analysis.experiments.benchmark.counting import generated_tokens, member_update
from analysis.experiments.benchmark.journal import Journal, Unwritten
from analysis.experiments.benchmark.worker import phase_shares, population
from analysis.schema import Schema

#: Of the bootstrap of a median.
RESAMPLES = 2000
MEMBERS = (1, 4, 8, 24, 48)
WIDTHS = (32, 64)
#: A turn of the population: this many member-updates, in whole logging windows.
WINDOW = 5

#: The population to which the others are compared.
ENGINE = "population of 24, 2 processes"


class BenchmarkConfig(Schema):
    """What is measured, and how often."""

    widths: tuple[int, ...] = Field(default=WIDTHS, min_length=1)
    members: tuple[int, ...] = MEMBERS
    rounds: int = Field(default=15, ge=1)
    with_trl: bool = True
    #: Also two processes and two threads, and what the machine does at best.
    whole_machine: bool = True

    @field_validator("widths")
    @classmethod
    def _widths_can_be_built(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(widths)) < len(widths):
            raise ValueError(f"a width is given twice: {list(widths)}")
        for width in widths:
            try:
                of_width(width)
            except ValidationError as error:
                reason = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"width {width}: {reason}") from None
        return widths


class Benchmark(NamedTuple):
    """What the rounds gave. All tables are tidy."""

    config: BenchmarkConfig
    rounds: pd.DataFrame  #: round, width, contender, members, processes, threads, seconds
    machine: pd.DataFrame  #: round, processes, flops_per_second, bytes_per_second, of all processes
    phases: pd.DataFrame  #: width, members, phase, share
    stamp: Stamp  #: source and versions at the start
    trl: str | None = None  #: the version that was timed


def contenders(config: BenchmarkConfig, width: int) -> list[Contender]:
    """All that are timed at one width, the machine itself included."""
    found = [
        Contender(kind="population", width=width, members=count, updates=_updates(count))
        for count in config.members
    ]
    ways = [(1, 1), (1, 2), (2, 1)] if config.whole_machine else [(1, 1)]
    found += [
        Contender(kind=kind, width=width, processes=processes, threads=threads, updates=2 * WINDOW)
        for kind in (("plain", "trl") if config.with_trl else ("plain",))
        for processes, threads in ways
    ]
    if config.whole_machine:
        two = Contender(kind="population", width=width, members=12, processes=2, updates=WINDOW)
        machine = [Contender(kind="machine", width=width, processes=p) for p in (1, 2)]
        found += [two, *machine]
    return found


def _updates(members: int) -> int:
    return WINDOW * max(1, 8 // members)


def run(
    config: BenchmarkConfig,
    say: Callable[[str], None] = lambda text: None,
    journal: Journal | None = None,
) -> Benchmark:
    """Time everything, width by width; contenders alternate within a round.

    Args:
        config: what is measured.
        say: hears of each round.
        journal: keeps each finished round; rounds that it holds are not measured again.

    Raises:
        ValueError: a contender does not start, or ends before its time.
    """
    journal = Unwritten() if journal is None else journal
    stamp = current_stamp(LARGEST, threads=1)
    trl = trl_version() if config.with_trl else None
    journal.begin(stamp, (config.model_copy(update={"rounds": 1}), trl))
    rounds, phases = [], []
    for width in config.widths:
        names = [f"width {width} round {number + 1}" for number in range(config.rounds)]
        missing = any(not journal.holds(name) for name in names)
        with crews(contenders(config, width) if missing else []) as everyone:
            for number, name in enumerate(names):
                say(f"{name} of {config.rounds}{' (kept)' if journal.holds(name) else ''}")
                rounds.append(journal.part(name, partial(_round, everyone, number)))
        timed_by_phase = partial(_phases, width, max(config.members))
        phases += journal.part(f"width {width} phases", timed_by_phase)
    timed, machine = ([row for part in rounds for row in part[name]] for name in Round._fields)
    tables = (pd.DataFrame(rows) for rows in (timed, machine, phases))
    return Benchmark(config, *tables, stamp, trl)


class Round(NamedTuple):
    """Rows of one round, as in :class:`Benchmark`."""

    timed: list[dict[str, Any]]
    machine: list[dict[str, Any]]


def _round(everyone: Sequence[Crew], number: int) -> dict[str, Any]:
    """Everyone's turn."""
    done = Round([], [])
    for crew in everyone:
        contender, turn = crew.contender, crew.turn()
        if contender.kind == "machine":
            rates = pd.DataFrame(turn.said).sum().to_dict()
            fields = {"width": contender.width, "processes": contender.processes}
            done.machine.append({"round": number, **fields, **rates})
        else:
            fields = contender.model_dump(exclude={"updates"})
            fields |= {"contender": contender.name, "seconds": turn.seconds}
            done.timed.append({"round": number, **fields})
    return done._asdict()


@contextlib.contextmanager
def crews(chosen: Sequence[Contender]) -> Iterator[list[Crew]]:
    """The processes of all contenders, ended however the block ends."""
    started: list[Crew] = []
    try:
        for contender in chosen:
            crew = Crew(contender)
            started.append(crew)
            crew.wait_until_ready()
        yield started
    finally:
        for crew in started:
            crew.end()


def _phases(width: int, members: int) -> list[dict[str, object]]:
    """The share of each phase in the time of a population, in this process and on one thread."""
    members = min(24, members)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = population(Contender(kind="population", width=width, members=members))
        trainer.advance()
        shares = phase_shares(trainer, 2 * WINDOW)
    finally:
        torch.set_num_threads(threads)
    return [
        {"width": width, "members": members, "phase": phase, "share": share}
        for phase, share in shares.items()
    ]


def medians(benchmark: Benchmark) -> pd.DataFrame:
    """One row per width and contender: ``ms`` per member-update (median over rounds, with its 95%
    bootstrap interval) and generated ``tokens`` per second."""
    rows = []
    for keys, group in benchmark.rounds.groupby(["width", "contender"], sort=False):
        width, name = keys
        low, middle, high = median_interval(1e3 * group["seconds"].to_numpy())
        config = Contender(kind="plain", width=width).config
        first = group.iloc[0]
        rows.append(
            {
                "width": width,
                "contender": name,
                "kind": first["kind"],
                "members": first["members"] * first["processes"],
                "processes": first["processes"],
                "threads": first["threads"],
                "ms": middle,
                "low": low,
                "high": high,
                "tokens": 1e3 * generated_tokens(config) / middle,
            }
        )
    return pd.DataFrame(rows)


def ratios(benchmark: Benchmark, engine: str = ENGINE) -> pd.DataFrame:
    """How many times longer each contender takes than ``engine``: the median over rounds of the
    ratio within a round, with its 95% bootstrap interval.

    Raises:
        ValueError: if ``engine`` was not timed.
    """
    wide = benchmark.rounds.pivot(index=["width", "round"], columns="contender", values="seconds")
    if engine not in wide:
        raise ValueError(f"engine={engine!r} was not timed: choose from {list(wide)}")
    kinds = benchmark.rounds.groupby("contender")["kind"].first()
    rows = []
    for width, group in wide.groupby(level="width"):
        for name in benchmark.rounds["contender"].unique():
            low, middle, high = median_interval((group[name] / group[engine]).to_numpy())
            row = {"width": width, "contender": name, "kind": kinds[name]}
            rows.append(row | {"ratio": middle, "low": low, "high": high})
    return pd.DataFrame(rows)


def best(table: pd.DataFrame, kind: str, width: int) -> pd.Series:
    """The fastest contender of a kind: its row of :func:`medians` or of :func:`ratios`.

    Raises:
        ValueError: none of that kind was timed.
    """
    rows = table[(table["kind"] == kind) & (table["width"] == width)]
    if rows.empty:
        raise ValueError(f"no contender of kind {kind!r} at width {width}")
    return rows.loc[rows["ratio" if "ratio" in rows else "ms"].idxmin()]


def floors(benchmark: Benchmark) -> pd.DataFrame:
    """One row per width and number of processes: the least ``ms`` per member-update that the
    measured rates allow, for its arithmetic (``flops_ms``) and its memory traffic (``bytes_ms``),
    and how many times longer the population takes (``ratio``, by round, with its interval)."""
    names = {1: "population of 24", 2: ENGINE}
    rows = []
    for (width, processes), group in benchmark.machine.groupby(["width", "processes"]):
        work = member_update(Contender(kind="plain", width=width).config)
        rates = group.set_index("round")
        arithmetic = 1e3 * work.flops / rates["flops_per_second"]
        traffic = 1e3 * work.bytes / rates["bytes_per_second"]
        timed = benchmark.rounds[
            (benchmark.rounds["width"] == width)
            & (benchmark.rounds["contender"] == names[processes])
        ].set_index("round")["seconds"]
        low, ratio, high = median_interval((1e3 * timed / arithmetic).dropna().to_numpy())
        rows.append(
            {
                "width": width,
                "processes": processes,
                "flops_ms": arithmetic.median(),
                "bytes_ms": traffic.median(),
                "gflops": rates["flops_per_second"].median() / 1e9,
                "gbytes": rates["bytes_per_second"].median() / 1e9,
                "ratio": ratio,
                "low": low,
                "high": high,
            }
        )
    return pd.DataFrame(rows)


def median_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Low end, median and high end: the 95% percentile bootstrap of the median."""
    if not len(values):
        return np.nan, np.nan, np.nan
    picks = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return low, float(np.median(values)), high
