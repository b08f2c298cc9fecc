"""Chapter 13: what a diagnosis shows, and the diagnosis put to the test."""

from __future__ import annotations

import pandas as pd

from kl_term.diagnosis.causes import find
from kl_term.diagnosis.columns import assemble
from kl_term.diagnosis.generate import EXAMPLES, Run, dump_path, simulate
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.reports import diagnose
from kl_term.diagnosis.schema import Settings

# What the chapter computes.

#: Runs without a fault, in the ways in which real ones differ.
HEALTHY: dict[str, Run] = {
    "as the example": Run(),
    "more sequences": Run(sequences=120),
    "KL term too weak to see": Run(sequences=100, pull=0.0),
    "reward drives the KL up": Run(sequences=100, pull=0.0, growth=12.0, drift=0.5, gain=0.5),
    "strictly on-policy": Run(sequences=100, update=0.0, learning=0.0, pull=0.0),
    "first step": Run(sequences=60, drift=1e-4, growth=1.0),
    "large steps": Run(sequences=60, learning=0.12, update=0.06),
    "noisy engine": Run(sequences=100, mismatch=0.05),
    "sharper, larger vocabulary": Run(sequences=60, vocabulary=300, sharpness=4.0),
}


def told_apart() -> pd.DataFrame:
    """Every example as the command diagnoses it: the planted fault (``expected``), the one that
    heads the report (``first``), and those ``also`` found."""
    rows = []
    for name, planted in EXAMPLES.items():
        first, *also = diagnose(dump_path(name)).codes() or ["nothing"]
        row = {"example": name.replace("_", " "), "expected": planted.expected or "nothing"}
        rows.append(row | {"first": first, "also": ", ".join(also)})
    return pd.DataFrame(rows)


def alarm_rates(runs: dict[str, Run], seeds: int) -> pd.DataFrame:
    """How many simulated runs without a fault are given an error or a warning."""
    rows = []
    for name, run in runs.items():
        alarms = 0
        for seed in range(seeds):
            frame = simulate(run, seed)
            dump = assemble({column: frame[column].to_numpy() for column in frame}, "simulated")
            found = find(measure(dump, Settings(resamples=200)))
            alarms += any(finding.severity != "note" for finding in found)
        rows.append({"run": name, "alarms": alarms, "dumps": seeds})
    return pd.DataFrame(rows)
