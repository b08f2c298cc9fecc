"""The diagnosis put to the test: are the examples told apart, and how often is health alarming?"""

from __future__ import annotations

import pandas as pd

from analysis.experiments.diagnosis.columns import assemble
from analysis.experiments.diagnosis.findings import find
from analysis.experiments.diagnosis.generate import EXAMPLES, Run, dump_path, simulate
from analysis.experiments.diagnosis.measure import measure
from analysis.experiments.diagnosis.reports import diagnose
from analysis.experiments.diagnosis.schema import Settings

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
    """Every example as the command diagnoses it.

    Returns:
        Tidy: example, ``expected`` (the planted fault), ``first`` (heading the report), ``also``.
    """
    rows = []
    for name, planted in EXAMPLES.items():
        codes = diagnose(dump_path(name)).codes() or ["nothing"]
        rows.append(
            {
                "example": name.replace("_", " "),
                "expected": planted.expected or "nothing",
                "first": codes[0],
                "also": ", ".join(codes[1:]),
            }
        )
    return pd.DataFrame(rows)


def alarm_rates(runs: dict[str, Run], seeds: int) -> pd.DataFrame:
    """How often simulated runs without a fault are given an error or a warning.

    Returns:
        Tidy: run, ``alarms``, ``dumps``.
    """
    settings = Settings(resamples=200)
    rows = []
    for name, run in runs.items():
        alarms = 0
        for seed in range(seeds):
            frame = simulate(run, seed)
            dump = assemble({column: frame[column].to_numpy() for column in frame}, name)
            found = find(measure(dump, settings))
            alarms += any(finding.severity != "note" for finding in found)
        rows.append({"run": name, "alarms": alarms, "dumps": seeds})
    return pd.DataFrame(rows)
