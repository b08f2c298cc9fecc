"""The page on how good the diagnosis is, from the recorded matrix of runs."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

import pandas as pd

from analysis.diagnosis.causes import CAUSES, Cause
from analysis.experiments.manifests import read_manifest
from analysis.report.tables import as_markdown

FOLDER = "diagnosis_matrix"
HELD_OUT = "diagnosis_held_out"
OUTCOMES = {
    "named": "the first finding names the fault",
    "symptom": "the first finding is a symptom, and lists the fault among what else it may be",
    "said": "nothing is found, and the report names the column that would tell",
    "missed": "nothing is found and nothing said",
    "misnamed": "the first finding is something else",
}
_CONSTANT = re.compile(r"((?:^#: .*\n)+)^([A-Z_0-9, ]+?) = ", re.MULTILINE)
_INTRODUCTION = """\
# How good the diagnosis is

{sound} sound runs of TRL {trl} ({kinds} kinds, seeds {seeds}): {silent} silent, {errors} with an
error, {warnings} with a warning. {faults} kinds of planted faults: {named} named first, {outcomes}.

The runs are of tiny models made from a configuration, seconds each; a fault is planted in the run
or in its dump. Anyone can run them again:

```sh
pip install -e '.[trl,diagnose]' peft
python -m benchmarks.diagnosis
```

A kind counts with its worst outcome under seeds {fault_seeds}. The thresholds were set while such
runs were looked at, so other models and trainers may do worse. Sound runs took a learning rate of
{rate}.
"""

_HELD_OUT = """\
## Faults that no threshold was set by

{faults} further kinds, written down with what should be found before any of them was run, and left
alone since: {named} named first, {outcomes}. A sampler that differs at few
tokens is not seen in so few completions.

```sh
python -m benchmarks.diagnosis --held-out
```
"""


def quality_page(folder: Path) -> str:
    """The page as MyST text, from a recorded matrix and the faults held out beside it."""
    manifest = read_manifest(folder)
    sound, faults, held_out = (
        pd.read_csv(path, keep_default_na=False)
        for path in (
            folder / "sound.csv",
            folder / "faults.csv",
            folder.with_name(HELD_OUT) / "faults.csv",
        )
    )
    return "\n".join(
        [
            _introduction(sound, faults, manifest),
            "## Planted faults, by where they are",
            "",
            _by_place(faults),
            "",
            *(f"- *{name}*: {meaning}." for name, meaning in OUTCOMES.items()),
            "",
            "## Faults that are not named first",
            "",
            _not_named(faults),
            "",
            _HELD_OUT.format(**_counted(held_out)),
            _not_named(held_out),
            "",
            "## Each finding",
            "",
            "What shows it, why its threshold stands where it does, how many sound runs raised it, "
            "and which faults it named.",
            "",
            *(_finding(cause, sound, faults) for cause in CAUSES),
        ]
    )


def _introduction(sound: pd.DataFrame, faults: pd.DataFrame, manifest: dict) -> str:
    return _INTRODUCTION.format(
        sound=len(sound),
        trl=manifest["versions"]["trl"],
        kinds=sound["kind"].nunique(),
        seeds=", ".join(map(str, manifest["seeds"])),
        fault_seeds=" and ".join(map(str, manifest["configuration"]["fault_seeds"])),
        silent=int((sound["codes"] == "").sum()),
        errors=int((sound["severity"] == "error").sum()),
        warnings=int((sound["severity"] == "warning").sum()),
        rate=manifest["configuration"]["sound"]["learning_rate"],
        **_counted(faults),
    )


def _counted(faults: pd.DataFrame) -> dict[str, str]:
    """How many kinds there are, how many were named, and the other outcomes."""
    by_kind = _kinds(faults)
    counts = by_kind.value_counts()
    named = counts.get("named", 0)
    return {
        "faults": str(len(by_kind)),
        "named": f"{named} ({named / len(by_kind):.0%})",
        "outcomes": ", ".join(f"{counts.get(n, 0)} {n}" for n in OUTCOMES if n != "named"),
    }


def _kinds(faults: pd.DataFrame) -> pd.Series:
    """The worst outcome of each kind under any seed."""
    order = list(OUTCOMES)
    worst = faults["outcome"].map(order.index).groupby(faults["kind"], sort=False).max()
    return worst.map(lambda rank: order[rank])


def _by_place(faults: pd.DataFrame) -> str:
    kinds = _kinds(faults).rename("outcome").reset_index()
    kinds["where"] = kinds["kind"].map(faults.groupby("kind")["where"].first())
    counts = pd.crosstab(kinds["where"], kinds["outcome"]).reindex(columns=list(OUTCOMES))
    counts = counts.fillna(0).astype(int).reindex(list(dict.fromkeys(faults["where"])))
    rows = [
        [str(place), *map(str, row)]
        for place, row in zip(counts.index, counts.to_numpy(), strict=True)
    ]
    return as_markdown(["at fault", *OUTCOMES], rows)


def _not_named(faults: pd.DataFrame) -> str:
    left = faults[faults["outcome"] != "named"]
    rows = [
        [
            f"{row.kind}, seed {row.seed}",
            row.outcome,
            ", ".join(f"`{code}`" for code in row.codes.split()[:2]) or "–",
        ]
        for row in left.itertuples()
    ]
    return as_markdown(["fault", "outcome", "found first"], rows)


def _finding(cause: Cause, sound: pd.DataFrame, faults: pd.DataFrame) -> str:
    raised = int(sound["codes"].str.split().map(lambda codes: cause.code in codes).sum())
    first = faults["codes"].str.split().str[0] == cause.code
    named = list(dict.fromkeys(faults[first & (faults["outcome"] == "named")]["kind"]))
    lines = [f"### `{cause.code}`", "", f"Evidence: {'; '.join(evidence_of(cause)) or '–'}.", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in reasons_of(cause).items()]
    lines += ["", f"False alarms: {raised} of {len(sound)} sound runs. "]
    lines[-1] += f"Named: {'; '.join(named)}." if named else "Named none of these faults."
    return "\n".join([*lines, ""])


def evidence_of(cause: Cause) -> list[str]:
    """What the finding shows, by the names of its first evidence."""
    tree = ast.parse(inspect.getsource(cause.when))
    first = next((node for node in ast.walk(tree) if isinstance(node, ast.Dict)), None)
    keys = [] if first is None else first.keys
    return [key.value for key in keys if isinstance(key, ast.Constant) and key.value]


def reasons_of(cause: Cause) -> dict[str, str]:
    """The thresholds that the condition uses, with the comment above each."""
    module = sys.modules[cause.when.__module__]
    reasons = {
        name.strip(): " ".join(line.removeprefix("#: ") for line in comment.splitlines())
        for comment, names in _CONSTANT.findall(inspect.getsource(module))
        for name in names.split(",")
    }
    used = re.findall(r"\b[A-Z][A-Z_0-9]{3,}\b", inspect.getsource(cause.when))
    return {name: reasons[name] for name in dict.fromkeys(used) if name in reasons}
