"""The recorded matrix, the page made of it, and a slice of it made again."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis.records.manifests import read_manifest
from analysis.report.diagnosis_quality import (
    BLIND,
    FOLDER,
    HEALTHY,
    HELD_OUT,
    OUTCOMES,
    SPEED,
    evidence_of,
    quality_page,
    reasons_of,
)
from benchmarks.diagnosis import healthy
from benchmarks.diagnosis.blind import record as blind
from kl_term.diagnosis.causes import CAUSES
from kl_term.diagnosis.divergence import kl_estimates
from kl_term.diagnosis.schema import Settings
from kl_term.diagnosis.statistics import FEWEST_RESAMPLED

RECORDED = Path(__file__).parents[2] / "results" / FOLDER


def recorded(name: str, folder: str = FOLDER) -> pd.DataFrame:
    return pd.read_csv(RECORDED.with_name(folder) / f"{name}.csv", keep_default_na=False)


def enough(coverage: pd.DataFrame) -> pd.Series:
    """Are there as many prompts as a bootstrap needs?"""
    return coverage["completions"] // coverage["group"] >= FEWEST_RESAMPLED


def test_sound_runs_are_silent_and_faults_are_named():
    sound, faults = recorded("sound"), recorded("faults")
    assert sound["kind"].nunique() >= 40 and set(sound["seed"]) == {0, 1, 2}
    assert (sound["severity"] != "error").all()
    assert (sound["codes"] != "").mean() < 0.02
    assert faults["kind"].nunique() >= 60
    assert (faults["outcome"] == "named").mean() >= 0.8
    assert (faults["outcome"] != "misnamed").all()


def test_the_page_says_what_was_recorded():
    page, faults = quality_page(RECORDED), recorded("faults")
    for kind in faults[faults["outcome"] != "named"]["kind"]:
        assert kind in page
    for name in OUTCOMES:
        assert f"*{name}*" in page
    named = int((faults["outcome"] == "named").groupby(faults["kind"]).all().sum())
    assert f"{faults['kind'].nunique()} kinds of planted faults: {named} (" in page
    for cause in CAUSES:
        assert f"### `{cause.code}`" in page


def test_dumps_made_without_the_diagnosis_are_told_by_their_record():
    dumps, page = recorded("dumps", BLIND), quality_page(RECORDED)
    faulty = dumps[dumps["faulty"]]
    assert (len(faulty), len(dumps) - len(faulty)) == (40, 20)
    assert (faulty["outcome"] == "first").mean() >= 0.7
    assert set(dumps[~dumps["faulty"]]["outcome"]) <= {"silent", "expected"}
    for row in faulty[~faulty["outcome"].isin(("first", "refused"))].to_dict("records"):
        assert f"| {row['name'].replace('-', ' ')} | {row['outcome']} |" in page


@pytest.mark.parametrize(
    ("faulty", "found", "outcome"),
    [
        (True, ["b:note", "a:note"], "among three"),
        (True, ["a:warning", "b:error"], "first"),
        (True, ["b:error"], "misnamed"),
        (True, ["b:note"], "missed"),
        (True, ["b:error"] * 3 + ["a:error"], "misnamed"),
        (False, ["b:note"], "silent"),
        (False, ["a:error"], "expected"),
        (False, ["a:error", "b:warning"], "alarm"),
    ],
)
def test_outcomes_of_a_dump(faulty: bool, found: list[str], outcome: str):
    findings = [dict(zip(("code", "severity"), one.split(":"), strict=True)) for one in found]
    assert blind.outcome(faulty, ["a"], findings) == outcome
    assert blind.outcome(faulty, ["a"], None) == ("refused" if faulty else "alarm")


def test_sound_runs_of_known_policies_stand_beside_the_rules():
    reading, coverage, alarms = (recorded(n, HEALTHY) for n in ("reading", "coverage", "alarms"))
    assert reading["kl"].min() == 1e-5 and reading["kl"].max() == 10
    assert set(reading["top_p"]) == {0.95, 1.0}
    near = reading[reading["kl"] == 1e-5]
    assert near["factor_far"].mean() > 0.3 and near["factor_negative"].mean() > 0.15, "what stood"
    assert reading["negative"].mean() < 0.005 and reading["far"].mean() < 0.01
    assert (coverage["repetitions"] >= 2000).all(), "a standard error of half a point"
    alike = coverage[(coverage["uneven"] == coverage["uneven"].min()) & enough(coverage)]
    assert alike[["k1", "k3"]].stack().between(0.93, 0.97).all(), "within two points of nominal"
    assert (alike[alike["updates"] >= 8]["k1_by_row"] < 0.7).all(), "what stood"
    assert alarms["errors"].mean() < 0.005
    page = quality_page(RECORDED)
    assert "## Sound runs whose KL is known" in page and "k1 > 2 k3, of micro-batches" in page


def test_the_page_says_what_a_million_tokens_take():
    speed = pd.read_csv(RECORDED.with_name(SPEED) / "speed.csv")
    assert set(speed["format"]) == {"parquet", "JSON lines", "CSV"}
    assert (speed["tokens"] == 1_000_000).all() and (speed["megabytes"] < 500).all()
    section = quality_page(RECORDED).split("## What it takes")[1].split("## Each finding")[0]
    for seconds in speed["seconds"]:
        assert f"{seconds:g}" in section
    assert "1,000,000 tokens" in section


def test_the_page_says_how_far_the_intervals_of_k3_fall_short():
    coverage, page = recorded("coverage", HEALTHY), quality_page(RECORDED)
    uneven = coverage["uneven"] > coverage["uneven"].min()
    alike = coverage[~uneven & enough(coverage)]["k3"]
    assert f"in\n{alike.min():.1%} to {alike.max():.1%} of the runs" in page
    few = coverage[~enough(coverage)]["k3"].min()
    assert few > 0.9 and f"holds $k_3$ in {few:.1%} of the runs" in page
    fallen = coverage[uneven]["k3"].min()
    assert fallen < 0.93 and f"hold it in {fallen:.1%} of the runs with the fewest prompts" in page


def test_intervals_from_sums_are_those_of_the_diagnosis():
    drawn = healthy.sample(healthy.Population(), 3, prompts=6, group=4, updates=2)
    settings = Settings(resamples=healthy.DIAGNOSED)
    estimates = kl_estimates(healthy.as_rollouts(drawn), settings)
    sums = healthy.row_sums(drawn).reshape(3, 2, 6, 4)
    found = healthy.intervals(sums)
    for name in ("k1", "k3"):
        own = next(e for e in estimates if (e.estimator, e.samples) == (name, "logged")).interval
        assert found[name] == pytest.approx((own.low, own.high), rel=1e-9)
        low, high = found[f"{name}_by_row"]
        assert high - low < own.high - own.low


def test_faults_are_held_out_and_none_is_left_out_of_their_record():
    from benchmarks.diagnosis.faults import FAULTS
    from benchmarks.diagnosis.faults import HELD_OUT as KINDS

    names = [fault.name for fault in KINDS]
    assert not set(names) & {fault.name for fault in FAULTS}
    rows = recorded("faults", HELD_OUT)
    assert list(rows["kind"].unique()) == names and (rows.groupby("kind").size() == 2).all()
    assert (rows["outcome"] != "misnamed").all()
    manifest = read_manifest(RECORDED.with_name(HELD_OUT))
    assert manifest["preset"] == HELD_OUT
    opening, held = quality_page(RECORDED).split("## Faults that no threshold was set by")
    named = int((rows["outcome"] == "named").groupby(rows["kind"]).all().sum())
    assert f"{len(names)} further kinds" in held
    assert f"Of {len(names)} kinds of faults that no threshold was set by, {named} (" in opening
    for kind in rows[rows["outcome"] != "named"]["kind"]:
        assert kind in held.split("## Each finding")[0]


def test_most_findings_have_evidence_and_a_reason():
    assert all(evidence_of(cause) for cause in CAUSES if cause.when.__module__.endswith("groups"))
    assert sum(bool(reasons_of(cause)) for cause in CAUSES) >= 30


@pytest.mark.peers
def test_a_slice_of_the_matrix_is_as_recorded():
    pytest.importorskip("trl", reason="the extra trl is not installed: make test-full")
    from benchmarks.diagnosis import matrix, sound
    from benchmarks.diagnosis.faults import FAULTS

    silent = [c for c in sound.cases((0,)) if c.name in ("loss type dapo", "on policy")]
    assert [row["codes"] for row in matrix.judge_sound(silent)] == ["", ""]
    chosen = (
        "another reference model",
        "reference rows of other completions",
        "old_logp from the start of the run",
        "sampler hotter",
        "top-k that the trainer does not know",
        "padding counted",
        "mask shifted by a token",
        "advantages with the wrong sign",
        "KL added to the advantages, no term column",
        "old_logp and ref_logp in bfloat16",
        "advantages shuffled",
        "end not counted",
        "KL subtracted from the loss",
        "beta never applied, no term column",
        "rows dumped twice",
    )
    rows = matrix.judge_faults([fault for fault in FAULTS if fault.name in chosen], (0,))
    faults = recorded("faults")
    before = faults[faults["seed"] == 0].set_index("kind")["outcome"]
    assert {row["kind"]: row["outcome"] for row in rows} == dict(before[list(chosen)])
