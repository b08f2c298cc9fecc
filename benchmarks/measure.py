"""The benchmark of the tiny policy: every trainer takes a turn in every round."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import pandas as pd
import torch

from analysis.chapters.ch12_performance import Benchmark
from benchmarks.processes import Case, Workers
from benchmarks.worker import phase_shares, population

RUNS = (1, 4, 8, 24, 48)
WIDTHS = (32, 64)
ROUNDS = 15
#: A turn of the population: this many run-updates, in whole logging windows.
WINDOW = 5


def cases(
    width: int, runs: Sequence[int] = RUNS, *, trl: bool = False, whole_machine: bool = True
) -> list[Case]:
    """All that are timed at one width: populations of so many runs, the plain trainer, TRL.

    With the whole machine also two processes and two threads, and what the machine does at best.
    """
    found = [
        Case(kind="population", width=width, runs=n, updates=WINDOW * max(1, 8 // n)) for n in runs
    ]
    ways = [(1, 1), (1, 2), (2, 1)] if whole_machine else [(1, 1)]
    found += [
        Case(kind=kind, width=width, processes=processes, threads=threads, updates=2 * WINDOW)
        for kind in (("plain", "trl") if trl else ("plain",))
        for processes, threads in ways
    ]
    if whole_machine:
        found.append(Case(kind="population", width=width, runs=12, processes=2, updates=WINDOW))
        found += [Case(kind="machine", width=width, processes=n) for n in (1, 2)]
    return found


def run(
    chosen: Sequence[Case], rounds: int, say: Callable[[str], None] = lambda text: None
) -> Benchmark:
    """Time the cases, width by width; they take turns within a round.

    Raises:
        ValueError: a process does not start, or ends before its time.
    """
    timed, machine, phases = [], [], []
    for width in dict.fromkeys(case.width for case in chosen):
        mine = [case for case in chosen if case.width == width]
        with _started(mine) as everyone:
            for number in range(rounds):
                say(f"width {width}, round {number + 1} of {rounds}")
                for workers in everyone:
                    rows = machine if workers.case.kind == "machine" else timed
                    rows.append({"round": number} | _turn(workers))
        phases += _phases(width, max(c.runs for c in mine if c.kind == "population"))
    return Benchmark(*(pd.DataFrame(rows) for rows in (timed, machine, phases)))


def _turn(workers: Workers) -> dict[str, object]:
    """The row of a turn: seconds of a trainer, or rates of the machine."""
    case, turn = workers.case, workers.turn()
    if case.kind == "machine":
        rates = pd.DataFrame(turn.answers).sum().to_dict()
        return {"width": case.width, "processes": case.processes, **rates}
    named = case.model_dump(exclude={"updates", "device"})
    return {**named, "trainer": case.name, "seconds": turn.seconds}


@contextlib.contextmanager
def _started(chosen: Sequence[Case]) -> Iterator[list[Workers]]:
    """The processes of all cases, ended however the block ends."""
    started: list[Workers] = []
    try:
        for case in chosen:
            started.append(Workers(case))
            started[-1].wait_until_ready()
        yield started
    finally:
        for workers in started:
            workers.end()


def _phases(width: int, runs: int) -> list[dict[str, object]]:
    """The share of each phase in the time of a population, in this process and on one thread."""
    runs = min(24, runs)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = population(Case(kind="population", width=width, runs=runs))
        trainer.advance()
        shares = phase_shares(trainer, 2 * WINDOW)
    finally:
        torch.set_num_threads(threads)
    return [
        {"width": width, "runs": runs, "phase": phase, "share": share}
        for phase, share in shares.items()
    ]
