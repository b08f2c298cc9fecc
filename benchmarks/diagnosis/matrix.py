"""Runs the matrix: each sound run and each fault under each seed, with what was found first."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.freshness import code_sha256, import_closure
from benchmarks.diagnosis import run_faults, tiny_runs
from benchmarks.diagnosis.faults import Fault
from benchmarks.diagnosis.tiny_runs import Case
from kl_term.diagnosis.columns import assemble
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.readers import read_rollouts, recorded_settings
from kl_term.diagnosis.reports import report
from kl_term.diagnosis.schema import Report
from kl_term.errors import UserError

Row = dict[str, Any]
#: Outcomes of a planted fault.
OUTCOMES = ("named", "symptom", "said", "missed", "misnamed")


def judge_sound(
    cases: Iterable[Case], kept: Path | None = None, say: Callable[[str], None] = print
) -> list[Row]:
    """A row a run: its loud codes, most important first.

    Args:
        cases: the runs.
        kept: a folder where dumps stay; such as are there are not made again.
        say: what a line on each run is given to.
    """
    rows = []
    for case in cases:
        with _folder(kept) as folder:
            found = _diagnosed(_dump(case, Path(folder)))
        rows.append({"kind": case.name, "seed": case.seed, **_loud(found)})
        say(f"sound, {case.name}, seed {case.seed}: {rows[-1]['codes'] or 'silent'}")
    return rows


def judge_faults(
    faults: Iterable[Fault],
    seeds: Iterable[int],
    kept: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[Row]:
    """A row a fault and seed, with its outcome; ``kept`` as of :func:`judge_sound`."""
    rows, seeds = [], tuple(seeds)
    with _folder(kept) as folder:
        for fault in faults:
            for seed in seeds:
                case = Case(name=fault.name, seed=seed, **fault.run)
                rows.append(judged(fault, seed, _dump(case, Path(folder))))
                say(f"{fault.name}, seed {seed}: {rows[-1]['outcome']} ({rows[-1]['codes']})")
    return rows


def _folder(kept: Path | None) -> Any:
    return tempfile.TemporaryDirectory() if kept is None else nullcontext(kept)


def _dump(case: Case, folder: Path) -> Path:
    """The dump of a run, trained unless one of the same case and code lies in the folder."""
    planted = [name for name, value in vars(run_faults).items() if value is case.fault]
    said = case._replace(name="", fault=None)
    key = json.dumps([_training_code(), planted, *map(repr, said)])
    place = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
    done = place / "done"
    if not done.is_file():
        shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
        tiny_runs.run(case, place)
        done.touch()
    return place / "dump"


@cache
def _training_code() -> str:
    """Hash of what trains and dumps, and not of what judges."""
    modules = import_closure(
        ["benchmarks/diagnosis/run_faults.py", "benchmarks/diagnosis/tiny_runs.py"]
    )
    judges = "kl_term/diagnosis/"
    return code_sha256(m for m in modules if not m.startswith(judges) or m.endswith("dumping.py"))


def judged(fault: Fault, seed: int, dump: Path) -> Row:
    """What the diagnosis makes of a dump with a fault."""
    try:
        found = _diagnosed(dump) if fault.dump is None else _changed(fault, seed, dump)
    except UserError as refusal:
        named = "refused" in fault.first
        outcome = "named" if named else "misnamed"
        row = {"codes": "refused", "severity": "", "said": str(refusal)}
    else:
        row = _loud(found)
        first = row["codes"].split(" ")[0]
        outcome = _outcome(fault, first, found)
    return {"kind": fault.name, "where": fault.where, "seed": seed, "outcome": outcome, **row}


def _outcome(fault: Fault, first: str, found: Report) -> str:
    if first in fault.first:
        return "named"
    if first in fault.symptom:
        return "symptom"
    if first:
        return "misnamed"
    unsaid = fault.column is None or not any(
        fault.column in why for why in found.not_measured.values()
    )
    return "missed" if unsaid else "said"


def _diagnosed(dump: Path) -> Report:
    return report(measure(read_rollouts(dump), recorded_settings(dump)), source=dump.name)


def _changed(fault: Fault, seed: int, dump: Path) -> Report:
    rollouts = read_rollouts(dump)
    columns = ("logp", "old_logp", "ref_logp", "sequence", "position", "entropy", "advantage",
               "reward", "step", "group", "token", "kl_term", "padding",
               "sampler_logp")  # fmt: skip
    held = {name: getattr(rollouts, name) for name in columns}
    frame = pd.DataFrame({name: values for name, values in held.items() if values is not None})
    frame = fault.dump(frame, np.random.default_rng(seed))
    changed = assemble(frame, fault.name)
    return report(measure(changed, recorded_settings(dump)), source=fault.name)


def _loud(found: Report) -> Row:
    loud = [f for f in found.findings if f.severity != "note"]
    return {
        "codes": " ".join(f.code for f in loud),
        "severity": loud[0].severity if loud else "",
        "said": loud[0].title if loud else "",
    }
