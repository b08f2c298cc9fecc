"""Tables of how the audit does on losses written after public reports, from their record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.records.manifests import read_manifest, recorded_table
from analysis.report.audit_sets import HELD_OUT, SEEN, LossSet
from analysis.report.generated import render

#: In place of codes: the audit could not call the loss, or could not tell its arguments.
REFUSALS = ("raises", "refused")
#: A repair -> the issue that it repairs, after which an earlier set has a loss.
REPAIRS = {"MakazhanAlpamys/Soup#735": "MakazhanAlpamys/Soup#723"}
OUTCOMES = {
    "named": "the first finding names the fault",
    "noted": "the first finding does, and is a note, as right losses have them too",
    "among three": "one of the first three does",
    "missed": "none of them does",
}


def corpus_page(results: Path) -> str:
    """How often the audit is right: on losses held out, then on the others.

    Args:
        results: the folder of the recordings, with one of each set of
            :mod:`analysis.report.audit_sets`.
    """
    return render(
        "audit_quality.md",
        versions=read_manifest(results / SEEN.folder)["versions"],
        outcomes=OUTCOMES,
        seen=_told(SEEN, results),
        held_out=[_held_out(each, results) for each in HELD_OUT],
    )


def _held_out(held_out: LossSet, results: Path) -> dict[str, Any]:
    """What the page says of a set; of one whose author had not seen the audit, each miss too."""
    told = _told(held_out, results)
    if not held_out.blind:
        return told
    earlier = (SEEN, *HELD_OUT[: HELD_OUT.index(held_out)])
    folder = results / held_out.folder
    known = _known(folder, tuple(results / each.folder for each in earlier))
    return told | _wrong(folder) | known


def _told(losses: LossSet, results: Path) -> dict[str, Any]:
    folder = results / losses.folder
    counts = corpus_counts(folder)
    told = {name: counts.get(name, 0) for name in ("broken", "right", "named", "missed", "clean")}
    return {
        **told,
        "alarms": counts.get("false alarm", 0),
        "title": losses.title,
        "what": losses.what.format(**told),
        "blind": losses.blind,
        "folder": losses.folder,
        "table": corpus_table(folder),
    }


def _wrong(folder: Path) -> dict[str, Any]:
    """What was missed and each false alarm, with what was found in its place."""
    rows = _rows(folder)
    told: dict[str, Any] = {}
    for outcome in ("missed", "false alarm"):
        of = rows[rows["outcome"] == outcome]
        told[outcome.replace(" ", "_")] = [
            {"what": row.what.rstrip("."), "codes": _codes(row.codes)} for row in of.itertuples()
        ]
    missed = rows.loc[rows["outcome"] == "missed", "codes"]
    alarms = rows.loc[rows["outcome"] == "false alarm", "codes"]
    silent = sum(all(code.startswith("(") for code in codes.split()) for codes in missed)
    return {
        "wrong": told,
        "silent": silent,
        "uncalled": int(missed.isin(REFUSALS).sum()),
        "refused": int(alarms.isin(REFUSALS).sum()),
    }


def _known(folder: Path, earlier: tuple[Path, ...]) -> dict[str, int]:
    """How many broken losses are after a report that an earlier set has a loss after."""
    before = {source for other in earlier for source in _rows(other)["source"]} - {""}
    rows = _rows(folder)
    broken = rows[rows["kind"] != ""]
    known = broken["source"].replace(REPAIRS).isin(before)
    named = broken["outcome"] == "named"
    return {
        "known": int(known.sum()),
        "known_named": int((known & named).sum()),
        "new": int((~known).sum()),
        "new_named": int((~known & named).sum()),
    }


def _codes(codes: str) -> str:
    return ", ".join(f"`{code.strip('()')}`" for code in codes.split())


def corpus_counts(folder: Path) -> dict[str, int]:
    """How many losses are broken and right, and what became of them.

    Args:
        folder: of a recorded set, which ``python -m tests.audit.scoring --record`` writes.
    """
    rows = _rows(folder)
    broken = rows["kind"] != ""
    return {
        "broken": int(broken.sum()),
        "right": int((~broken).sum()),
        **{name: int(count) for name, count in rows["outcome"].value_counts().items()},
    }


def corpus_table(folder: Path) -> str:
    """MyST: a line a broken loss, with the report it was written after and the first finding."""
    lines = ["| what is wrong | after | found first | outcome |", "| --- | --- | --- | --- |"]
    rows = _rows(folder)
    for row in rows[rows["kind"] != ""].itertuples():
        first = str(row.codes).split(" ")[0].strip("()") or "–"
        cells = (row.what, _link(str(row.source)), f"`{first}`", row.outcome)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _rows(folder: Path) -> pd.DataFrame:
    return recorded_table(folder, "losses.csv").fillna("")


def _link(source: str) -> str:
    """A report as a link: GitHub sends an issue's number on to the pull request of that number.
    Where none was found, a dash."""
    if not source:
        return "–"
    repository, _, number = source.partition("#")
    if number:
        return f"[{source}](https://github.com/{repository}/issues/{number})"
    repository, _, commit = source.partition("@")
    return f"[{source}](https://github.com/{repository}/tree/{commit})"
