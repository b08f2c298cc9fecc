"""Prose held to predictions: made-up designs that say what the text says, and that do not."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from scipy import stats

from analysis.evidence import predictions
from analysis.records import recording
from analysis.records.preset import EQUAL_KL

ROW = {
    "variant": "k3",
    "other": "exact",
    "metric": "reward",
    "at": "0.1",
    "expected": "equivalent",
    "mean": 0.02,
    "low": -0.01,
    "high": 0.05,
    "outcome": "holds",
}


def table(*changes: dict) -> pd.DataFrame:
    return pd.DataFrame([ROW | change for change in changes])


@pytest.fixture
def tables(monkeypatch):
    """Designs by name, each the table of its judged predictions; the prose says nothing of them."""
    found: dict[str, pd.DataFrame] = {}
    monkeypatch.setattr(predictions, "judged", found.__getitem__)
    monkeypatch.setattr(predictions, "OTHERWISE", {})
    return found


@pytest.mark.parametrize(
    ("expected", "sign"), [("equivalent", "="), ("above", ">"), ("below", "<")]
)
def test_a_prediction_is_spelled_with_its_sign(expected, sign):
    spelled = predictions.spelled(ROW | {"expected": expected})
    assert spelled == f"k3 {sign} exact: reward at 0.1"


def test_what_is_not_named_holds_and_every_departure_is_listed(tables, monkeypatch):
    tables["a"] = table({}, {"metric": "length", "outcome": "open"})
    tables["b"] = table({"outcome": "refuted"})
    length = "k3 = exact: length at 0.1"
    with pytest.raises(ValueError, match="the runs") as raised:
        predictions.check_outcomes(["a", "b"])
    departures = (
        f"a: {length}: the text says holds, the runs open",
        "b: k3 = exact: reward at 0.1: the text says holds, the runs refuted",
        "mend the prose, and OTHERWISE in analysis/evidence/predictions.py",
    )
    assert str(raised.value) == "; ".join(departures[:2]) + f": {departures[2]}"
    said = {"a": {length: "open"}, "b": {"k3 = exact: reward at 0.1": "refuted"}}
    monkeypatch.setattr(predictions, "OTHERWISE", said)
    predictions.check_outcomes(["a", "b"])
    said["b"]["k1 = none: reward at 1"] = "open"
    unfound = r"^b: k1 = none: reward at 1: the text says open, the runs nothing: mend"
    with pytest.raises(ValueError, match=unfound):
        predictions.check_outcomes(["a", "b"])


def with_pilots(monkeypatch, **same: list[bool]):
    """Recordings whose designs had pilots of the same configuration, or of another."""

    def recorded_runs(name):
        pilots = [SimpleNamespace(same=one) for one in same[name]]
        return SimpleNamespace(preset=SimpleNamespace(design=SimpleNamespace(pilots=pilots)))

    monkeypatch.setattr(predictions, "recorded_runs", recorded_runs)


def test_one_pilot_of_the_same_configuration_makes_a_replication(monkeypatch):
    with_pilots(monkeypatch, none=[], other=[False], one=[False, True])
    assert [predictions.replicates(n) for n in ("none", "other", "one")] == [False, False, True]


def test_a_page_shows_every_design_with_its_name(tables, monkeypatch):
    with_pilots(monkeypatch, a=[True], b=[])
    tables.update(a=table({}, {"metric": "length"}), b=table({}))
    page = predictions.page(iter(["a", "b"]), {"k3": "a sample"}, length="+.1f")
    assert page.index.tolist() == [0, 1, 2]
    assert page["design"].tolist() == ["a", "a", "b"]
    assert page["replication"].tolist() == [True, True, False]
    assert page["spec"].tolist() == ["+.3f", "+.1f", "+.3f"]
    assert page["compared"].tolist() == ["a sample − exact"] * 3
    tables["b"] = table({"outcome": "open"})
    with pytest.raises(ValueError, match="b: k3 = exact"):
        predictions.page(["a", "b"], {})


@pytest.mark.parametrize(
    ("metric", "at", "is_ratio"),
    [
        ("reward", "0.1", False),
        ("reverse_kl", "0.1", True),
        ("reverse_kl", EQUAL_KL, False),
        ("jumps of reward", "0.1", True),
        ("log_peak_gradient", "0.1", True),
        ("jumps of reward", EQUAL_KL, True),
    ],
)
def test_logarithms_are_shown_as_ratios(metric, at, is_ratio):
    (row,) = predictions.shown(table({"metric": metric, "at": at}), {}).to_dict("records")
    said = (0.02, -0.01, 0.05)
    values = [math.exp(value) for value in said] if is_ratio else said
    assert [row["mean"], row["low"], row["high"]] == pytest.approx(values, abs=1e-15)
    assert row["spec"] == (".2f" if is_ratio else "+.3f")
    assert row["compared"] == ("k3 / exact" if is_ratio else "k3 − exact")


def test_keys_are_names_and_both_variants_are_called_as_the_page_calls_them():
    names = {"k3": "one sample", "exact": "the vocabulary"}
    shown = predictions.shown(table({"variant": "k3"}, {"variant": "mask_0.1  a"}), names)
    assert shown["key"].tolist() == ["k3_exact_reward", "mask_0_1_a_exact_reward"]
    assert shown["compared"].tolist() == [
        "one sample − the vocabulary",
        "mask_0.1  a − the vocabulary",
    ]
    assert shown["outcome"].tolist() == ["holds"] * 2


def test_of_two_predictions_about_one_difference_at_equal_kl_the_first_is_quoted(tables):
    at = {"at": EQUAL_KL}
    tables["a"] = table(
        {"mean": 9.0}, at | {"other": "none"}, at | {"mean": 0.5}, at | {"expected": "above"}
    )
    assert predictions.at_equal_kl("a", "k3", "exact") == (0.5, -0.01, 0.05)
    assert predictions.at_equal_kl("a", "k3", "none").mean == 0.02


def test_a_comparison_that_no_design_names_is_the_paired_t_interval_of_the_stored_rows():
    """Ten starts of two seeds, at one of three coefficients."""
    folder = Path(recording.RESULTS) / "stale_starts_cpu"
    rows = pd.read_csv(folder / "final.csv").query("beta == 0.3")
    wide = rows.pivot(index="seed", columns="variant", values="reward")
    gaps = wide["exact"] - wide["k2"]
    means = gaps.groupby(gaps.index % 10).mean()
    t = stats.ttest_1samp(means, 0.0)
    found = predictions.unpredicted("stale_starts", "exact", "k2", "reward", 0.3)
    said = [found[name] for name in ("mean", "low", "high", "p")]
    ends = t.confidence_interval()
    assert said == pytest.approx([means.mean(), ends.low, ends.high, t.pvalue], abs=1e-12)
    names = ("variant", "other", "metric", "at", "expected", "starts", "seeds")
    asked = ["exact", "k2", "reward", "0.3", "equivalent", len(means), len(gaps)]
    assert [found[name] for name in names] == asked
    assert 0 < found["equivalent"] < 1


@pytest.mark.parametrize(
    ("again", "same"),
    [(["holds", "open"], True), (["holds", "refuted"], False), (["open", "holds"], False)],
)
def test_a_second_recording_must_have_every_outcome(again, same, tables, monkeypatch):
    tables["here"] = pd.DataFrame({"outcome": ["holds", "open"]})
    monkeypatch.setattr(
        predictions.recording, "load", lambda folder: folder.relative_to(recording.RESULTS).name
    )
    judged_again = {"there": pd.DataFrame({"outcome": again})}
    monkeypatch.setattr(predictions.designs, "judged_predictions", judged_again.__getitem__)
    assert predictions.same_elsewhere("here", "there") is same
