"""The page on how good the diagnosis is, from the recorded matrix of runs."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.records.manifests import read_manifest
from analysis.report.generated import render
from kl_term.diagnosis.causes import CAUSES, Cause
from kl_term.diagnosis.statistics import FEWEST_RESAMPLED

FOLDER = "diagnosis_matrix"
HELD_OUT = "diagnosis_held_out"
HEALTHY = "diagnosis_healthy"
SPEED = "diagnosis_speed"
BLIND = "diagnosis_blind"
OUTCOMES = {
    "named": "the first finding names the fault",
    "symptom": "the first finding is a symptom, and lists the fault among what else it may be",
    "said": "nothing is found, and the report names the column that would tell",
    "missed": "nothing is found and nothing said",
    "misnamed": "the first finding is something else",
}
_CONSTANT = re.compile(r"((?:^#: .*\n)+)^([A-Z_0-9, ]+?) = ", re.MULTILINE)


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
    return render(
        "diagnosis_quality.md",
        **manifest,
        outcomes=OUTCOMES,
        sound={
            "runs": len(sound),
            "kinds": sound["kind"].nunique(),
            "silent": (sound["codes"] == "").sum(),
            "errors": (sound["severity"] == "error").sum(),
            "warnings": (sound["severity"] == "warning").sum(),
        },
        planted=_counted(faults),
        held_out=_counted(held_out),
        by_place=_by_place(faults),
        blind=_blind(folder.with_name(BLIND)),
        healthy=_healthy(folder.with_name(HEALTHY)),
        speed=_speed(folder.with_name(SPEED)),
        findings=[_finding(cause, sound, faults) for cause in CAUSES],
    )


def _counted(faults: pd.DataFrame) -> dict[str, Any]:
    """The faults, how many kinds there are, how many were named, and the other outcomes."""
    by_kind = _kinds(faults)
    counts = by_kind.value_counts()
    named = counts.get("named", 0)
    return {
        "rows": list(faults.itertuples()),
        "kinds": len(by_kind),
        "named": f"{named} ({named / len(by_kind):.0%})",
        "others": ", ".join(f"{counts.get(n, 0)} {n}" for n in OUTCOMES if n != "named"),
    }


def _blind(folder: Path) -> dict[str, Any]:
    """Dumps made without the diagnosis: how often each outcome, and what was not first."""
    dumps = pd.read_csv(folder / "dumps.csv", keep_default_na=False)
    faulty, sound = dumps[dumps["faulty"]], dumps[~dumps["faulty"]]
    return {
        "faulty": len(faulty),
        "sound": len(sound),
        "counts": dumps["outcome"].value_counts().to_dict(),
        "others": [
            row | {"found": [code.split(":")[0] for code in row["codes"].split()]}
            for row in faulty[~faulty["outcome"].isin(("first", "refused"))].to_dict("records")
        ],
    }


def _healthy(folder: Path) -> dict[str, Any]:
    """Sound runs of known policies: the reading rules, intervals and findings that they met."""
    reading, coverage, alarms = (
        pd.read_csv(folder / f"{name}.csv", keep_default_na=False)
        for name in ("reading", "coverage", "alarms")
    )
    repetitions = len(read_manifest(folder)["seeds"])
    rules = reading.rename(columns=RULES)
    shares = [*RULES.values()]
    rules[shares] = rules[shares].map(_percent)
    prompts, lowest = coverage["completions"] // coverage["group"], coverage["uneven"].min()
    few, apart = prompts < FEWEST_RESAMPLED, coverage["uneven"] > lowest
    alike, uneven = coverage[~few & ~apart], coverage[apart]
    held = coverage.rename(columns=COVERED)
    held[[*COVERED.values()]] = held[[*COVERED.values()]].map(_percent)
    loud = alarms.assign(errors=alarms["errors"].map(_percent))
    loud["warnings"] = loud["warnings"].map(_percent)
    return {
        "repetitions": repetitions,
        "rules": rules.set_index(["kl", "completions", "group", "top_p"]),
        "coverage": held.set_index(["completions", "group", "updates", "kl", "uneven"]),
        "intervals_of": f"{coverage['repetitions'].min():,}",
        "alike": alike["uneven"].iloc[0],
        "apart": uneven["uneven"].iloc[0],
        "lowest": {name: f"{alike[name].min():.1%}" for name in ("k1", "k3")},
        "highest": {name: f"{alike[name].max():.1%}" for name in ("k1", "k3")},
        "few": {name: f"{coverage[few][name].min():.1%}" for name in ("k1", "k3")},
        "uneven": {name: f"{uneven[name].min():.1%}" for name in ("k1", "k3")},
        "alarms": loud.set_index(["completions", "group", "updates", "kl"]),
        "runs": repetitions * len(alarms),
        "errors": round(float(alarms["errors"].sum()) * repetitions),
        "warnings": round(float(alarms["warnings"].sum()) * repetitions),
    }


def _speed(folder: Path) -> dict[str, Any]:
    """What a diagnosis of one dump takes in each format, and where that was measured."""
    table = pd.read_csv(folder / "speed.csv")
    manifest = read_manifest(folder)
    return {
        "tokens": f"{table['tokens'].iloc[0]:,}",
        "device": manifest["device"],
        "repetitions": manifest["configuration"]["repetitions"],
        "table": table.drop(columns="tokens").set_index("format").rename(columns=TAKEN),
    }


#: What the columns of the tables are called on the page.
TAKEN = {"seconds": "processor, s", "megabytes": "memory, MB"}
RULES = {
    "factor_far": "k1 > 2 k3",
    "factor_negative": "k1 < -k3",
    "micro_far": "k1 > 2 k3, of micro-batches",
    "micro_negative": "k1 < -k3, of micro-batches",
    "far": "k1 - k3 above four errors",
    "negative": "below",
}
COVERED = {"k1": "k1", "k3": "k3", "k1_by_row": "k1, by row", "k3_by_row": "k3, by row"}


def _percent(share: float) -> str:
    return f"{share:.0%}" if share == 0 or share > 0.095 else f"{share:.1%}"


def _kinds(faults: pd.DataFrame) -> pd.Series:
    """The worst outcome of each kind under any seed."""
    order = list(OUTCOMES)
    worst = faults["outcome"].map(order.index).groupby(faults["kind"], sort=False).max()
    return worst.map(lambda rank: order[rank])


def _by_place(faults: pd.DataFrame) -> pd.DataFrame:
    kinds = _kinds(faults).rename("outcome").reset_index()
    kinds["where"] = kinds["kind"].map(faults.groupby("kind")["where"].first())
    counts = pd.crosstab(kinds["where"], kinds["outcome"]).reindex(columns=list(OUTCOMES))
    places = list(dict.fromkeys(faults["where"]))
    return counts.fillna(0).astype(int).reindex(places).rename_axis("at fault")


def _finding(cause: Cause, sound: pd.DataFrame, faults: pd.DataFrame) -> dict[str, Any]:
    first = faults["codes"].str.split().str[0] == cause.code
    return {
        "code": cause.code,
        "evidence": evidence_of(cause),
        "reasons": reasons_of(cause),
        "raised": sum(cause.code in codes.split() for codes in sound["codes"]),
        "named": list(dict.fromkeys(faults[first & (faults["outcome"] == "named")]["kind"])),
    }


def evidence_of(cause: Cause) -> list[str]:
    """What the finding shows, by the names of its first evidence."""
    tree = ast.parse(inspect.getsource(cause.when))
    first = next((node for node in ast.walk(tree) if isinstance(node, ast.Dict)), None)
    keys = [] if first is None else first.keys
    return [key.value for key in keys if isinstance(key, ast.Constant) and key.value]


def reasons_of(cause: Cause) -> dict[str, str]:
    """The thresholds that the condition uses, with the comment above each."""
    source = inspect.getsource(sys.modules[cause.when.__module__])
    shared = re.findall(r"^from (kl_term\.diagnosis\.conditions\.\w+) import", source, re.MULTILINE)
    sources = [*(inspect.getsource(sys.modules[name]) for name in shared), source]
    reasons = {
        name.strip(): " ".join(line.removeprefix("#: ") for line in comment.splitlines())
        for text in sources
        for comment, names in _CONSTANT.findall(text)
        for name in names.split(",")
    }
    used = re.findall(r"\b[A-Z][A-Z_0-9]{3,}\b", inspect.getsource(cause.when))
    return {name: reasons[name] for name in dict.fromkeys(used) if name in reasons}
