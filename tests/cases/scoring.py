"""What the tools say of public threads: ``python -m tests.cases.scoring --record``.

Each thread of ``book/cases.yaml`` has a small dump, which the diagnosis reads, or a loss of the
corpus, which the audit reads. What they say goes to ``results/real_cases``, and from there to the
page; the tests say it again.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pandas as pd

from analysis.freshness import code_sha256, import_closure
from analysis.records.manifests import write_folder
from analysis.report.audit_sets import SETS
from analysis.report.project import Project
from analysis.report.real_cases import FOLDER, Case, load_cases
from analysis.sweeps.provenance import provenance_here
from kl_term.diagnosis.reports import diagnose
from kl_term.diagnosis.schema import Settings
from tests.audit.corpus import Entry, read
from tests.audit.scoring import audited

ROOT = Path(__file__).parents[2]
DUMPS = Path(__file__).with_name("dumps")
RECORDED = ROOT / "results" / FOLDER


def said(case: Case) -> dict[str, str]:
    """The first finding of a thread's dump or loss, and the codes of the others."""
    if case.dump:
        path = DUMPS / f"{case.dump}.jsonl.gz"
        report = diagnose(path, Settings.model_validate(case.settings))
        found = [(f.severity, f.code, f.title) for f in report.findings]
    else:
        entry = next(e for e in (*read(), *read(*SETS["held out"].sections)) if e.name == case.loss)
        found = _of_loss(entry)
    severity, code, says = found[0] if found else ("", "", "")
    others = " ".join(code for grade, code, _ in found[1:] if grade != "note")
    return {
        "thread": case.thread,
        "severity": severity,
        "code": code,
        "says": says,
        "others": others,
    }


def _of_loss(entry: Entry) -> list[tuple[str, str, str]]:
    """The findings of its audit, after what it promises to minimise and does not."""
    audit = audited(entry)
    found = [(f.severity, f.code, f.says) for f in audit.findings]
    claimed, is_so = (entry.claims or {}).get("minimises"), audit.minimises["fresh"]["state"]
    if claimed and claimed != is_so:
        found.insert(0, ("error", "expectation", f"it minimises {is_so}, and promises {claimed}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the recorded table")
    chosen = parser.parse_args()
    began = time.perf_counter()
    found = pd.DataFrame([said(case) for case in load_cases(Project(ROOT)).cases])
    print(found.to_string(index=False))
    if chosen.record:
        fields = provenance_here(code_sha256(import_closure(["tests/cases/scoring.py"])))
        rest = {
            "preset": FOLDER,
            "seeds": [],
            "configuration": {"cases": len(found)},
            "seconds": round(time.perf_counter() - began),
        }
        write_folder(RECORDED, {"cases.csv": found}, fields.model_dump() | rest)
        print(f"written to {RECORDED}")


if __name__ == "__main__":
    main()
