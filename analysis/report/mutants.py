"""What mutants of the judgements survived their tests, for ``book/reliability.md``."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analysis.records.manifests import read_manifest
from analysis.report.generated import render
from analysis.report.project import Project
from analysis.report.strict_yaml import load_yaml

#: Of a mutant that survives, and of which nobody has shown that it is no change.
UNEXPLAINED = "a test is missing"


def mutants_found(project: Project) -> str:
    """What ``make mutants`` found: the score of each module, and each survivor with its reason."""
    folder = project.results / "mutants"
    if not folder.is_dir():
        return "Nothing is recorded in this checkout: run `make mutants`.\n"
    manifest = read_manifest(folder)
    left = survivors(folder)
    reasons = equivalent(project)
    explained = [
        _reason(module, becomes, reasons)
        for module, becomes in zip(left["module"], left["becomes"], strict=True)
    ]
    return render(
        "mutants.md",
        modules=pd.read_csv(folder / "modules.csv"),
        survivors=left.assign(reason=explained),
        **(manifest | {"folder": "mutants"}),
    )


def survivors(folder: Path) -> pd.DataFrame:
    """The mutants of a record that no test noticed; one that takes a line away becomes nothing."""
    return pd.read_csv(folder / "survivors.csv", keep_default_na=False)


def equivalent(project: Project) -> list[tuple[str, str, str]]:
    """Module, how the changed line begins, and why that changes nothing."""
    path = project.book / "equivalent_mutants.yaml"
    rows = load_yaml(path, project.relative(path)) if path.is_file() else []
    return [(row["module"], line, row["reason"]) for row in rows for line in row["becomes"]]


def _reason(module: str, becomes: str, reasons: list[tuple[str, str, str]]) -> str:
    said = (why for where, line, why in reasons if where == module and becomes.startswith(line))
    return next(said, UNEXPLAINED)
