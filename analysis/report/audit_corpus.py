"""Tables of how the audit does on losses written after public reports, from their record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.records.manifests import read_manifest, recorded_table
from analysis.report.generated import render

FOLDER = "audit_corpus"
HELD_OUT = "audit_held_out"
HELD_OUT_AGAIN = "audit_held_out_again"
HELD_OUT_THIRD = "audit_held_out_third"
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


def corpus_page(folder: Path) -> str:
    """How often the audit is right: on losses held out, then on the others.

    Args:
        folder: ``results/audit_corpus``; ``results/audit_held_out``,
            ``results/audit_held_out_again`` and ``results/audit_held_out_third`` lie beside it.
    """
    held_out = [folder.with_name(name) for name in (HELD_OUT, HELD_OUT_AGAIN)]
    third = folder.with_name(HELD_OUT_THIRD)
    return render(
        "audit_quality.md",
        versions=read_manifest(folder)["versions"],
        outcomes=OUTCOMES,
        seen=_told(folder),
        held_out=_told(held_out[0]),
        again=_told(held_out[1]),
        third=_told(third) | _wrong(third) | _known(third, (folder, *held_out)),
    )


def _told(folder: Path) -> dict[str, Any]:
    counts = corpus_counts(folder)
    told = {name: counts.get(name, 0) for name in ("broken", "right", "named", "missed", "clean")}
    alarms = counts.get("false alarm", 0)
    return {**told, "alarms": alarms, "folder": folder.name, "table": corpus_table(folder)}


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
        folder: ``results/audit_corpus``, which ``python -m tests.audit.scoring --record`` writes.
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
