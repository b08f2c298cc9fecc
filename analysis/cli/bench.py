"""``analysis bench``: how fast training is on this machine, beside what it could be."""

from __future__ import annotations

import sys
from pathlib import Path

from analysis.errors import Refused
from analysis.experiments.benchmark import recorded
from analysis.experiments.benchmark.contenders import TRL_PYTHON, trl_version
from analysis.experiments.benchmark.measure import (
    BenchmarkConfig,
    floors,
    medians,
    ratios,
    run,
)


def bench(
    rounds: int = 15,
    widths: tuple[int, ...] = BenchmarkConfig().widths,
    directory: Path = recorded.RECORDED,
) -> None:
    """Time the population, a plain trainer and TRL in turns, and what the machine does at best.

    Takes some minutes and two cores; keep the machine otherwise idle. TRL is timed if the Python
    named by KL_TERM_TRL_PYTHON, or this one, can import it.

    Args:
        rounds: turns of each contender.
        widths: of the model.
        directory: where the recorded benchmark goes.
    """
    try:
        version = trl_version()
        config = BenchmarkConfig(rounds=rounds, widths=widths, with_trl=version is not None)
        print(f"TRL {version or f'not found: name a Python that has it in {TRL_PYTHON}'}")
        benchmark = run(config, lambda text: print(text, file=sys.stderr))
    except ValueError as error:
        raise Refused(str(error)) from None
    recorded.save(benchmark, directory)
    table, relative = medians(benchmark), ratios(benchmark)
    columns = ["ms", "low", "high", "tokens"]
    print(table.set_index(["width", "contender"])[columns].round(1).to_string())
    print(relative.drop(columns="kind").set_index(["width", "contender"]).round(2).to_string())
    print(floors(benchmark).round(2).to_string(index=False))
    print(f"written to {directory}")
