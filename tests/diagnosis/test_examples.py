"""Every known fault is told apart, healthy runs are left alone, files are the generator's."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from analysis.chapters.ch13_diagnose_run import HEALTHY, alarm_rates, told_apart
from kl_term.diagnosis import generate
from kl_term.diagnosis.causes import find
from kl_term.diagnosis.columns import assemble
from kl_term.diagnosis.generate import EXAMPLES, FOLDER, simulate
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.reports import diagnose
from kl_term.diagnosis.schema import Settings

FAST = Settings(resamples=200)
FRESH_SEEDS = range(5)


def codes(frame) -> list[str]:
    return [finding.code for finding in find(measure(assemble(frame, "simulated"), FAST))]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_file_is_what_the_generator_makes(name):
    stored = (FOLDER / f"{name}.csv.gz").read_bytes()
    assert gzip.decompress(stored).decode() == generate.as_csv(generate.example(name))


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "healthy"])
def test_the_fault_is_found_under_other_seeds(name):
    for seed in FRESH_SEEDS:
        assert EXAMPLES[name].expected in codes(generate.example(name, seed)), seed


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_raise_no_alarm(name):
    alarms = [codes(simulate(HEALTHY[name], 500 + seed)) for seed in range(12)]
    assert alarms == [[]] * 12


def test_trials_are_counted():
    runs = {"healthy": HEALTHY["as the example"], "stale": EXAMPLES["stale_samples"].run}
    rates = alarm_rates(runs, 3).set_index("run")
    assert rates.alarms.to_dict() == {"healthy": 0, "stale": 3}


def test_the_fault_heads_the_report():
    rows = told_apart()
    assert len(rows) == len(EXAMPLES) and list(rows["first"]) == list(rows.expected)


def test_shuffled_rows_change_nothing(tmp_path):
    frame = generate.example("stale_samples")
    shuffled = frame.sample(frac=1, random_state=0)
    paths = [tmp_path / "sorted.csv", tmp_path / "shuffled.csv"]
    for path, rows in zip(paths, (frame, shuffled), strict=True):
        path.write_text(generate.as_csv(rows))
    first, second = (diagnose(path, FAST).model_dump(exclude={"source"}) for path in paths)
    for key in ("tokens", "sequences", "findings", "measurements"):
        assert _rounded(first[key]) == _rounded(second[key]), key


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.9g}") if np.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
