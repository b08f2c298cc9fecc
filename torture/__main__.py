"""``python -m torture``: break it on purpose and count what gets past."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pandas as pd
import torch

from analysis.freshness import code_sha256, import_closure
from analysis.records.recording import write_folder
from analysis.report.project import find_project
from analysis.sweeps.provenance import provenance_here
from kl_term.errors import UserError
from torture.book import book
from torture.flips import flips
from torture.mutations import mutations
from torture.outcome import Outcome, say
from torture.sweeps import failing_disks, kills

#: Of a sweep that is killed again and again, over an undisturbed one.
MOST_COMPUTE = 1.2


def main() -> int:
    """Run, print a table, and say by the exit status whether anything got past."""
    parser = argparse.ArgumentParser(prog="python -m torture", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--books", type=int, default=20, help="kills of the making of a book")
    parser.add_argument("--flips", type=int, default=10_000, help="bits")
    parser.add_argument("--mutations", type=int, default=200)
    parser.add_argument("--every", type=int, default=1, help="one failing operation in so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--record", type=Path, help="a folder, such as results/torture")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, seed = time.monotonic(), options.seed
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        parts = [
            pool.submit(kills, options.kills, random.Random(seed), say),
            pool.submit(book, options.books, random.Random(seed), say),
            pool.submit(mutations, options.mutations, random.Random(seed), say),
            pool.submit(flips, options.flips, random.Random(seed), say),
            pool.submit(failing_disks, say, options.every),
        ]
        outcomes = [outcome for part in parts for outcome in part.result()]
    table = pd.DataFrame(outcomes)
    table = table[table["tried"] > 0]
    print(table.to_string(index=False, na_rep="", float_format="%.3f"))
    seconds = time.monotonic() - started
    print(f"{table['tried'].sum():,} faults in {seconds:.0f} s")
    if options.record is not None:
        _record(table, options, seconds)
    return 0 if survived(outcomes) else 1


def survived(outcomes: list[Outcome]) -> bool:
    """Nothing lost, nothing silent, and little computed twice."""
    return all(not (one.lost or one.silent or one.compute > MOST_COMPUTE) for one in outcomes)


def _record(table: pd.DataFrame, options: argparse.Namespace, seconds: float) -> None:
    root = find_project(Path(__file__).parent).root
    files = import_closure([f"torture/{path.name}" for path in Path(__file__).parent.glob("*.py")])
    asked = {
        name: getattr(options, name) for name in ("kills", "books", "flips", "mutations", "every")
    }
    fields = {
        "preset": "torture",
        "seeds": [options.seed],
        **provenance_here(code_sha256(files, root)).model_dump(),
        "asked": asked,
        "wall_seconds": round(seconds, 1),
    }
    write_folder(options.record, {"faults.csv": table}, fields)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as refusal:
        sys.exit(f"torture: {refusal}")
