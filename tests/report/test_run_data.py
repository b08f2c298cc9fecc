"""What the site serves of the recorded runs: every digit of the recordings, and no other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy import stats

from analysis.records.manifests import read_table
from analysis.report.run_data import FIRST, METRICS, index, recordings, run_data

RESULTS = Path(__file__).resolve().parents[2] / "results"


def test_a_recording_is_served_digit_by_digit() -> None:
    folder = RESULTS / FIRST
    data, curves = run_data(folder), read_table(folder / "curves.csv")
    for metric, tables in data["values"].items():
        served = {
            (entry["variant"], entry["beta"], seed, update): value
            for entry, table in zip(data["variants"], tables, strict=True)
            for seed, row in zip(data["seeds"], table, strict=True)
            for update, value in zip(data["updates"], row, strict=True)
        }
        keys = zip(*(curves[key] for key in ("variant", "beta", "seed", "update")), strict=True)
        recorded = dict(zip(keys, curves[metric], strict=True))
        assert served.keys() == recorded.keys(), metric
        for key, value in recorded.items():
            assert served[key] == value or (served[key] is None and np.isnan(value)), (metric, key)
    assert "reverse_kl" in data["values"]


def test_every_recording_of_curves_is_listed_with_what_it_is_about() -> None:
    about = index(RESULTS, {"half_step": "04_grpo_ablation#fig-ablation-accuracy"})
    listed = [entry["name"] for entry in about["recordings"]]
    assert listed[0] == FIRST
    assert sorted(listed) == sorted(path.parent.name for path in RESULTS.glob("*/curves.csv"))
    assert all(len(entry["about"]) > 20 for entry in about["recordings"])
    assert about["recordings"][0]["page"] == "04_grpo_ablation"
    assert list(about["metrics"]) == list(METRICS)
    assert about["quantiles"][10] == stats.t.ppf(0.975, 9)
    assert min(about["quantiles"]) == 4


def test_a_metric_that_never_varies_is_left_out() -> None:
    for folder in recordings(RESULTS)[:6]:
        curves = read_table(folder / "curves.csv")
        for metric in run_data(folder)["values"]:
            assert curves[metric].nunique() > 1, (folder.name, metric)
