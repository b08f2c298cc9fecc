"""The verdicts and figures of the ledger do not hang on the processor that recomputes them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.report.ledger import load_ledger
from analysis.report.project import Project

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

#: Instructions that every x86-64 processor has, in each library that chooses its own.
OLD_PROCESSOR = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OPENBLAS_CORETYPE": "Nehalem",
}

RECOMPUTE = """
from pathlib import Path
import torch
from analysis.report.ledger import load_ledger, recompute
from analysis.report.project import Project
print(torch.backends.cpu.get_cpu_capability())
outcomes = list(recompute(load_ledger(Project(Path()))))
print(len(outcomes), [f"{o.claim.id}: {o.problem}" for o in outcomes if o.problem])
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="no such instructions")
def test_the_ledger_comes_out_on_an_old_processor() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RECOMPUTE],
        cwd=ROOT,
        env=os.environ | OLD_PROCESSOR,
        capture_output=True,
        text=True,
        check=True,
    )
    capability, found = done.stdout.splitlines()
    assert capability == "DEFAULT"
    assert found == f"{len(load_ledger(Project(ROOT)))} []"
