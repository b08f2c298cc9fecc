"""What ``make torture`` found, as a part of the page ``book/reliability.md``."""

from __future__ import annotations

import pandas as pd

from analysis.errors import UserError
from analysis.experiments.manifests import read_manifest
from analysis.report.numbers import format_value
from analysis.report.project import Project
from analysis.report.tables import as_markdown

RECORDED = "torture"
_FIGURES = """\
`make torture` broke things {total} times: {lost} finished results lost, {silent} faults unnoticed.
Sweeps that were killed again and again computed {compute} times the updates of an undisturbed one.

{table}
Recorded in `results/{recorded}` in {minutes} minutes on {device}, with {versions}.
"""


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
    return _FIGURES.format(
        total=_count(faults["tried"].sum()),
        lost=_count(faults["lost"].sum()),
        silent=_count(faults["silent"].sum()),
        compute=format_value("compute", float(faults["compute"].max()), ".2f"),
        table=as_markdown(
            ("Fault", "Tried", "Lost", "Unnoticed"),
            (
                (row.fault, _count(row.tried), _count(row.lost), _count(row.silent))
                for row in faults.itertuples()
            ),
        ),
        recorded=RECORDED,
        minutes=format_value("minutes", manifest["wall_seconds"] / 60, ".0f"),
        device=manifest["device"],
        versions=", ".join(f"{name} {number}" for name, number in manifest["versions"].items()),
    )


def _count(value: int) -> str:
    return format_value("count", int(value), ",d")
