"""``python -m benchmarks.diagnosis``: how good the diagnosis is, on TRL runs made here."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import tyro

from analysis.freshness import code_sha256, import_closure
from analysis.records.manifests import check_target, write_folder
from analysis.sweeps.provenance import provenance_here
from benchmarks.diagnosis import matrix, sound, tiny_runs
from benchmarks.diagnosis.faults import FAULTS, HELD_OUT
from kl_term.errors import UserError

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "results" / "diagnosis_matrix"
HELD_OUT_RECORDED = ROOT / "results" / "diagnosis_held_out"


def record(
    seeds: tuple[int, ...] = sound.SEEDS,
    fault_seeds: tuple[int, ...] = (0, 1),
    only: str | None = None,
    held_out: bool = False,
    directory: Path | None = None,
    dumps: Path | None = None,
) -> None:
    """Train every sound run and every faulty one, diagnose them, and record what was found.

    Needs TRL, peft and the extra diagnose; a minute for ten runs on one core; no network.

    Args:
        seeds: of the sound runs.
        fault_seeds: of the faulty ones.
        only: only kinds whose name holds this; then nothing is recorded without --directory.
        held_out: only the faults by which no threshold was set, and no sound runs.
        directory: where the record goes; by default results/diagnosis_matrix, or
            results/diagnosis_held_out.
        dumps: where dumps stay: those that this code has trained before are judged and not trained.
    """
    if directory is None and only is None:
        directory = HELD_OUT_RECORDED if held_out else RECORDED
    if directory is not None:
        check_target(directory)
    began = time.perf_counter()
    cases, every = ([], HELD_OUT) if held_out else (sound.cases(seeds), FAULTS)
    chosen = [case for case in cases if only is None or only in case.name]
    faults = [fault for fault in every if only is None or only in fault.name]
    if not (chosen or faults):
        raise UserError(f"--only {only}: no kind has that in its name")
    tables = {
        "sound.csv": pd.DataFrame(matrix.judge_sound(chosen, dumps)),
        "faults.csv": pd.DataFrame(matrix.judge_faults(faults, fault_seeds, dumps)),
    }
    print(summary(tables["sound.csv"], tables["faults.csv"]))
    if directory is not None:
        fields = _fields(seeds, fault_seeds, began)
        if held_out:
            del tables["sound.csv"], fields["configuration"]["sound"]
            fields |= {"preset": "diagnosis_held_out", "seeds": list(fault_seeds)}
        write_folder(directory, tables, fields)
        print(f"written to {directory}")


def summary(silent: pd.DataFrame, faults: pd.DataFrame) -> str:
    """How many sound runs were silent, and the outcomes of the faults."""
    loud = 0 if silent.empty else int((silent["codes"].fillna("") != "").sum())
    outcomes = {} if faults.empty else faults["outcome"].value_counts().to_dict()
    return f"{len(silent)} sound runs, {loud} not silent; {len(faults)} faulty ones: {outcomes}"


def _fields(seeds: Sequence[int], fault_seeds: Sequence[int], began: float) -> dict[str, Any]:
    made = provenance_here(code_sha256(import_closure(["benchmarks/diagnosis/__main__.py"])))
    fields = made.model_dump()
    fields["versions"] |= {name: version(name) for name in ("transformers", "trl")}
    return fields | {
        "preset": "diagnosis_matrix",
        "seeds": list(seeds),
        "configuration": {
            "settings": tiny_runs.SETTINGS,
            "sound": sound.RATE,
            "fault_seeds": list(fault_seeds),
        },
        "seconds": round(time.perf_counter() - began),
    }


if __name__ == "__main__":
    try:
        tyro.cli(record)
    except UserError as refusal:
        sys.exit(f"{refusal}")
