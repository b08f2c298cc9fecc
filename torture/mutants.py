"""``python -m torture.mutants``: change one place of a module at a time; do its tests fail?

mutmut makes the mutants and runs the tests (``tool.mutmut`` in pyproject.toml). Constants of a
module and functions under a decorator have no mutants.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from analysis.freshness import code_sha256
from analysis.records.manifests import write_folder
from analysis.report.project import find_project
from analysis.sweeps.provenance import provenance_here

#: Words of mutmut for a mutant that the tests tell from the original: they fail, crash or hang.
NOTICED = ("killed", "timeout", "suspicious", "segfault")


def main() -> None:
    """Make and try all mutants, and record what came of them in ``results/mutants``."""
    root = find_project(Path(__file__).parent).root
    started = time.monotonic()
    shutil.rmtree(root / "mutants", ignore_errors=True)  # mutmut leaves copies that are stale
    subprocess.run([_mutmut(), "run", "--max-children", "2"], cwd=root, check=True)
    statuses = read_statuses(_said(root, "results", "--all", "true"))
    modules = of_modules(statuses)
    left = [name for name, status in statuses.items() if status not in NOTICED]
    survivors = pd.DataFrame(
        [{"module": module_of(name), **changed(_said(root, "show", name))} for name in left],
        columns=["module", "was", "becomes"],
    )
    files = [name.replace(".", "/") + ".py" for name in modules["module"]]
    fields = {
        "preset": "mutants",
        "seeds": [],
        **provenance_here(code_sha256(files, root)).model_dump(),
        "mutmut": version("mutmut"),
        "wall_seconds": round(time.monotonic() - started, 1),
    }
    tables = {"modules.csv": modules, "survivors.csv": survivors}
    write_folder(root / "results" / "mutants", tables, fields)
    print(modules.to_string(index=False))


def read_statuses(text: str) -> dict[str, str]:
    """Mutant -> status, of what ``mutmut results`` prints."""
    pairs = (line.strip().partition(": ") for line in text.splitlines() if "__mutmut_" in line)
    return {name: status for name, _, status in pairs}


def of_modules(statuses: dict[str, str]) -> pd.DataFrame:
    """How many mutants each module has, and how many of them the tests noticed.

    Raises:
        ValueError: a mutant was not tried.
    """
    if untried := [name for name, status in statuses.items() if status == "not checked"]:
        raise ValueError(f"{len(untried)} mutants were not tried, such as {untried[0]}")
    rows = pd.DataFrame(
        [(module_of(name), status in NOTICED) for name, status in statuses.items()],
        columns=["module", "killed"],
    )
    return (
        rows.groupby("module")
        .agg(mutants=("killed", "size"), killed=("killed", "sum"))
        .reset_index()
    )


def module_of(mutant: str) -> str:
    """``a.b`` of ``a.b.x_function__mutmut_3``."""
    return mutant.rpartition(".")[0]


def changed(diff: str) -> dict[str, str]:
    """The lines that a mutant takes away and puts there."""
    lines = diff.splitlines()
    return {"was": _signed(lines, "-"), "becomes": _signed(lines, "+")}


def _signed(lines: Iterable[str], sign: str) -> str:
    head = sign * 3 + " "
    kept = (line for line in lines if line.startswith(sign) and not line.startswith(head))
    return " ".join(line[1:].strip() for line in kept)


def _said(root: Path, *arguments: str) -> str:
    asked = [_mutmut(), *arguments]
    return subprocess.run(asked, cwd=root, check=True, capture_output=True, text=True).stdout


def _mutmut() -> str:
    return str(Path(sys.executable).with_name("mutmut"))


if __name__ == "__main__":
    main()
