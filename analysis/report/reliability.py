"""What ``make torture`` found, as a part of the page ``book/reliability.md``."""

from __future__ import annotations

import pandas as pd

from analysis.errors import UserError
from analysis.experiments.manifests import read_manifest
from analysis.report.generated import render
from analysis.report.project import Project

RECORDED = "torture"


def torture_figures(project: Project) -> str:
    """The sentence and the table as MyST text.

    Raises:
        UserError: the record is damaged, or something got past.
    """
    folder = project.results / RECORDED
    if not folder.is_dir():
        return "Nothing is recorded in this checkout: run `make torture`.\n"
    manifest = read_manifest(folder)
    faults = pd.read_csv(folder / "faults.csv")
    past = faults[(faults["lost"] > 0) | (faults["silent"] > 0)]
    if not past.empty:
        said = ", ".join(past["fault"])
        raise UserError(f"results/{RECORDED}: {said}: say on the page what got past, or mend it")
    return render("torture.md", folder=RECORDED, faults=faults, **manifest)
