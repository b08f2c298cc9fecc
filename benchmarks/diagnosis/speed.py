"""``python -m benchmarks.diagnosis.speed``: what a diagnosis of a million tokens takes, by format.

Each runs in a process of its own, imports included. Processor time is what the process used, so
that a busy machine delays it and does not lengthen it much; the least of some repetitions is kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro

from analysis.freshness import code_sha256, import_closure
from analysis.records.manifests import check_target, write_folder
from analysis.sweeps.provenance import provenance_here
from kl_term.errors import UserError

RECORDED = Path(__file__).parents[2] / "results" / "diagnosis_speed"
COMPLETIONS, LENGTH, STEPS, GROUP = 4000, 250, 16, 10
FORMATS = {"parquet": "parquet", "JSON lines": "jsonl", "CSV": "csv"}
#: Decimals of the two formats of text.
DECIMALS = 6

_WORKER = """
import json, re, resource, sys
from kl_term.cli.main import main
code = main(["diagnose", sys.argv[1]])
used = resource.getrusage(resource.RUSAGE_SELF)
# Of this process; what getrusage calls the peak begins with that of the one that started it.
peak = int(re.search(r"VmHWM:\\s+([0-9]+)", open("/proc/self/status").read())[1]) / 2**10
print(json.dumps({"code": code, "seconds": used.ru_utime, "megabytes": peak}))
"""


def record(repetitions: int = 3, directory: Path = RECORDED) -> None:
    """Write a dump in each format, diagnose it in a process of its own, and record what that took.

    Args:
        repetitions: of each format.
        directory: where the record goes.
    """
    check_target(directory)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        files = write_dumps(Path(folder))
        for name, path in files.items():
            taken = [measured(path) for _ in range(repetitions)]
            rows.append(
                {
                    "format": name,
                    "tokens": COMPLETIONS * LENGTH,
                    "seconds": round(min(each["seconds"] for each in taken), 2),
                    "megabytes": round(max(each["megabytes"] for each in taken)),
                }
            )
            print(rows[-1], flush=True)
    timed = ["benchmarks/diagnosis/speed.py", "kl_term/cli/diagnose.py"]
    made = provenance_here(code_sha256(import_closure(timed)))
    fields = made.model_dump() | {
        "preset": "diagnosis_speed",
        "seeds": [0],
        "configuration": {"repetitions": repetitions, "completions": COMPLETIONS},
    }
    write_folder(directory, {"speed.csv": pd.DataFrame(rows)}, fields)
    print(f"written to {directory}")


def measured(path: Path) -> dict[str, Any]:
    """Seconds of processor time and megabytes of one diagnosis."""
    command = [sys.executable, "-c", _WORKER, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["code"] != 0:
        raise UserError(f"{path.name}: the diagnosis ended with {found['code']}")
    return found


def write_dumps(folder: Path) -> dict[str, Path]:
    """One dump in each format, with twelve columns: CSV one row a token, the others a sequence."""
    nested = _columns()
    files = {name: folder / f"dump.{ending}" for name, ending in FORMATS.items()}
    lists = {name: list(column) for name, column in nested.items()}
    pd.DataFrame(lists).to_parquet(files["parquet"])
    with open(files["JSON lines"], "w", encoding="utf-8") as file:
        for row in range(COMPLETIONS):
            values = {name: column[row].round(DECIMALS) for name, column in nested.items()}
            file.write(json.dumps({name: value.tolist() for name, value in values.items()}) + "\n")
    flat = {
        name: column.ravel() if column.ndim > 1 else np.repeat(column, LENGTH)
        for name, column in nested.items()
    }
    flat["sequence"] = np.repeat(np.arange(COMPLETIONS), LENGTH)
    pd.DataFrame(flat).to_csv(files["CSV"], index=False, float_format=f"%.{DECIMALS}f")
    return files


def _columns() -> dict[str, np.ndarray]:
    """[completions, tokens], or [completions] of what a completion has once."""
    rng = np.random.default_rng(0)
    shape = COMPLETIONS, LENGTH
    old = -3 * rng.random(shape)

    def near() -> np.ndarray:
        return np.minimum(old + 0.02 * rng.standard_normal(shape), 0.0)

    reward = rng.standard_normal(COMPLETIONS)
    number = np.arange(COMPLETIONS)
    return {
        "logp": near(),
        "old_logp": old,
        "ref_logp": near(),
        "sampler_logp": near(),
        "entropy": -old,
        "kl_term": 0.02 * rng.standard_normal(shape),
        "token": rng.integers(0, 50_000, shape),
        "advantage": reward,
        "reward": reward,
        "step": number * STEPS // COMPLETIONS,
        "group": number // GROUP,
    }


if __name__ == "__main__":
    try:
        tyro.cli(record)
    except UserError as refusal:
        sys.exit(f"{refusal}")
