"""Diagnose the dumps as a user would, and record what was found: once, before anything is mended.

``python -m benchmarks.diagnosis.blind.record``
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
import tyro

from analysis.freshness import code_sha256, import_closure
from analysis.records.manifests import check_target, write_folder
from analysis.sweeps.provenance import provenance_here
from benchmarks.diagnosis.blind import WORDS
from benchmarks.diagnosis.blind.dumps import write
from benchmarks.diagnosis.blind.faults import FAULTS
from benchmarks.diagnosis.blind.sound import SOUND
from kl_term.cli.main import main as command
from kl_term.errors import UserError

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "results" / "diagnosis_blind"


def outcome(faulty: bool, expected: list[str], found: list[dict[str, Any]] | None) -> str:
    """Where a finding that says the fault stands; of a sound dump, whether any finding misleads.

    Args:
        faulty: the dump has a fault.
        expected: codes that say it, or that may be noted of a sound dump.
        found: findings of the report in its order; None where the dump was refused.
    """
    if found is None:
        return "refused" if faulty else "alarm"
    codes, loud = [f["code"] for f in found], [f for f in found if f["severity"] != "note"]
    if not faulty:
        odd = [f for f in loud if f["code"] not in expected]
        return "alarm" if odd else "expected" if loud else "silent"
    places = [place for place, code in enumerate(codes) if code in expected]
    if places and places[0] < 3:
        return "among three" if places[0] else "first"
    return "misnamed" if loud else "missed"


def diagnosed(line: str, folder: Path) -> tuple[list[dict[str, Any]] | None, str]:
    """The findings of a command, or None and the refusal."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    shown = io.StringIO()
    said = contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown)
    with contextlib.chdir(folder), said[0], said[1]:
        command([*shlex.split(line)[3:], "--json", str(report)])
    if not report.exists():
        return None, shown.getvalue().strip()
    return json.loads(report.read_text())["findings"], ""


def record(directory: Path = RECORDED, seed: int = 0) -> None:
    """Write, diagnose and judge every dump.

    Args:
        directory: where the record goes.
        seed: of the dumps.
    """
    check_target(directory)
    began, rows, words = time.perf_counter(), [], tomllib.loads(WORDS.read_text())
    with tempfile.TemporaryDirectory() as made:
        for name, dump in (FAULTS | SOUND).items():
            path = write(dump, name, Path(made), seed)
            found, refusal = diagnosed(dump.command(path), Path(made))
            expected = words[name]["codes"]
            rows.append(
                {
                    "name": name,
                    "kind": words[name]["kind"],
                    "faulty": name in FAULTS,
                    "outcome": outcome(name in FAULTS, expected, found),
                    "expected": " ".join(expected),
                    "codes": " ".join(f"{f['code']}:{f['severity']}" for f in found or ()),
                    "refusal": refusal,
                }
            )
            print(f"{name}: {rows[-1]['outcome']} ({rows[-1]['codes'] or refusal})")
            path.unlink()
    modules = import_closure(["benchmarks/diagnosis/blind/record.py"])
    fields = provenance_here(code_sha256(modules)).model_dump() | {
        "preset": "diagnosis_blind",
        "seeds": [seed],
        "configuration": {},
        "seconds": round(time.perf_counter() - began),
    }
    write_folder(directory, {"dumps.csv": pd.DataFrame(rows)}, fields)
    print(f"written to {directory}")


if __name__ == "__main__":
    try:
        tyro.cli(record)
    except UserError as refusal:
        sys.exit(f"{refusal}")
