"""What is said of runs on a learned reward: on made runs of known truth, and by stored rows."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.chapters.ch22_proxy import controls, runs, stopping
from analysis.records.recording import RESULTS

BETAS = (0.1, 0.2, 0.4, 1.0)


def truth_at(kl):
    """A truth that every run of :func:`made` has at a KL."""
    return 0.9 - 0.3 * np.sqrt(kl)


def made(shift: float = 0.0, of: str = "") -> SimpleNamespace:
    """A recording of three starts on one curve, and one variant's gold off it by a shift."""
    path = [(s, 10 * u) for s in range(3) for u in range(9)]
    curves = pd.DataFrame(path, columns=["seed", "update"]).assign(variant="none", beta=0.0)
    curves["reverse_kl"] = 0.04 * curves["update"] * (1 + 0.1 * curves["seed"])
    middle = curves["reverse_kl"] + 0.2 * (1 + 0.1 * curves["seed"])
    curves["gold"] = truth_at(middle)
    own = [
        {"variant": v, "beta": b, "seed": s, "final_reverse_kl": 0.3 / b * (1 + 0.05 * s)}
        for v in (*runs.REVERSE, "k3_loss")
        for b in BETAS
        for s in range(3)
    ]
    finals = pd.DataFrame(own)
    finals["final_gold"] = truth_at(finals["final_reverse_kl"]) + shift * (finals["variant"] == of)
    first = finals.assign(update=0, gold=finals["final_gold"] - 0.02, reverse_kl=0.0)
    return SimpleNamespace(curves=pd.concat([curves, first]), finals=finals)


@pytest.mark.parametrize("shift", [0.0, -0.05])
def test_a_term_off_the_curve_is_seen_off_it_by_its_shift(monkeypatch, shift):
    monkeypatch.setattr(runs, "recorded", lambda preset: made(shift, "k3_loss"))
    found = runs.below_the_curve("any", "k3_loss")
    assert found.mean == pytest.approx(shift, abs=1e-12)


@pytest.mark.parametrize("shift", [0.0, 0.04])
def test_a_run_that_is_stopped_is_compared_at_the_kl_of_the_other(monkeypatch, shift):
    """The path is linear in the root of the KL, so that reading it off is exact."""
    monkeypatch.setattr(runs, "recorded", lambda preset: made(shift, "exact_loss"))
    assert runs.over_stopped("any").mean == pytest.approx(shift, abs=1e-12)


def test_what_a_run_gained_is_counted_from_its_own_first_window(monkeypatch):
    monkeypatch.setattr(runs, "recorded", lambda preset: made())
    assert runs.gained("any", 0.4).mean == pytest.approx(0.02, abs=1e-12)


def test_the_truth_lost_without_a_term_is_that_of_the_stored_rows():
    finals, curves = (
        pd.read_csv(RESULTS / "proxy_5k_cpu" / name) for name in ("final.csv", "curves.csv")
    )
    found = runs.numbers("proxy_5k")
    none = finals[finals["variant"] == "none"]
    assert found["none_gold"] == pytest.approx(none["final_gold"].mean(), abs=1e-12)
    first = curves[(curves["variant"] == "none") & (curves["update"] == 0)]
    assert found["start_gold"] == pytest.approx(first["gold"].mean(), abs=1e-12)
    exact = finals[finals["variant"] == "exact_loss"].groupby("beta")["final_gold"].mean()
    assert (found["best_beta"], found["best_gold"]) == (exact.idxmax(), pytest.approx(exact.max()))


def test_designs_are_compared_start_by_start():
    """The means over the starts differ by little beside the starts themselves."""
    tables = (pd.read_csv(RESULTS / f"{n}_cpu" / "final.csv") for n in ("proxy_20k", "proxy_1k"))
    many, few = (
        dict(zip(t["seed"], t["final_gold"], strict=True))
        for t in (table[table["variant"] == "none"] for table in tables)
    )
    gaps = [many[seed] - few[seed] for seed in sorted(many)]
    reach = stats.t.ppf(0.975, len(gaps) - 1) * np.std(gaps, ddof=1) / np.sqrt(len(gaps))
    found = runs.of_labels("proxy_20k", "proxy_1k")
    assert found.mean == pytest.approx(np.mean(gaps), abs=1e-12)
    assert found.high - found.mean == pytest.approx(reach, abs=1e-12)
    assert found.low < 0 < found.high  # the page says that no help was seen


def test_a_late_term_is_compared_with_one_from_the_start():
    """From the stored rows: what was lost before, and what is missing at the end."""
    finals, starts = (
        pd.read_csv(RESULTS / f"{n}_cpu" / "final.csv") for n in ("proxy_controls", "proxy_5k")
    )
    exact = starts[(starts["variant"] == "exact_loss") & (starts["beta"] == controls.BETA)]
    exact = dict(zip(exact["seed"], exact["final_gold"], strict=True))
    for name, told in (("late_50", False), ("late_200", True)):
        own = finals[finals["variant"] == name]
        gaps = [
            gold - exact[seed] for seed, gold in zip(own["seed"], own["final_gold"], strict=True)
        ]
        found = controls.less_than_from_the_start(name)
        assert found.mean == pytest.approx(np.mean(gaps), abs=1e-12) and len(gaps) == 10
        assert (found.high < 0) == told
    curves = pd.read_csv(RESULTS / "proxy_controls_cpu" / "curves.csv")
    own = curves[(curves["variant"] == "late_100") & (curves["update"] == 90)]
    assert controls.before(100) == pytest.approx(own["gold"].mean(), abs=1e-12)
    assert controls.before(200) < controls.before(100) < 0.6  # the page says: it had fallen


@pytest.mark.parametrize("first", [20, 50, 100])
def test_what_was_lost_is_back_after_as_many_updates_as_went_by(first):
    curves = pd.read_csv(RESULTS / "proxy_controls_cpu" / "curves.csv")
    gold = curves[curves["variant"] == f"late_{first}"].groupby("update")["gold"].mean()
    lowest = gold[gold.index <= first].min()
    assert gold[2 * first + 10] - lowest > 0.85 * (gold.iloc[-1] - lowest) > 0.1


def test_a_rule_stops_where_a_loop_over_the_stored_windows_does():
    curves = pd.read_csv(RESULTS / "proxy_ensemble_cpu" / "curves.csv")
    own = curves[curves["variant"] == stopping.WATCHED]
    golds: dict[str, list[float]] = {rule: [] for rule in stopping.RULES}
    for _, run in own.groupby("seed"):
        windows = run.sort_values("update").to_dict("records")
        first, kept = windows[0]["spread"], {"kl": math.nan, "spread": math.nan}
        for rule, column, most in (("kl", "reverse_kl", 0.1), ("spread", "spread", 1.5 * first)):
            for window in windows:
                if window[column] > most:
                    break
                kept[rule] = window["gold"]
        # the mean of four is a quarter of the first and three quarters of the others' mean
        kept["others"] = max(windows, key=lambda w: w["all_members"] - w["proxy"] / 4)["gold"]
        kept["careful"] = max(windows, key=lambda w: w["all_members"] - 2 * w["spread"])["gold"]
        kept |= {"peak": max(w["gold"] for w in windows), "end": windows[-1]["gold"]}
        for rule, gold in kept.items():
            golds[rule].append(gold)
    table = stopping.rules().set_index("rule")
    for rule, values in golds.items():
        assert len(values) == 10
        assert table.loc[rule, "gold"] == pytest.approx(np.mean(values), abs=1e-12)
        less = np.array(values) - np.array(golds["peak"])
        assert table.loc[rule, "less"] == pytest.approx(less.mean(), abs=1e-12)


def test_truth_at_the_end_and_the_growth_of_the_spread_are_of_the_stored_rows():
    finals, curves = (
        pd.read_csv(RESULTS / "proxy_ensemble_cpu" / name) for name in ("final.csv", "curves.csv")
    )
    own = finals[(finals["variant"] == "worst") & (finals["beta"] == 0.2)]
    assert stopping.at_the_end("worst", 0.2) == pytest.approx(own["final_gold"].mean(), abs=1e-12)
    for variant in ("none_first", "none_mean"):
        by_update = curves[curves["variant"] == variant].set_index(["update", "seed"])["spread"]
        ratio = by_update[290] / by_update[0]
        found = stopping.spread_growth(variant)
        assert found == pytest.approx(stats.gmean(ratio), abs=1e-9)


@pytest.mark.parametrize("shift", [0.0, 0.07])
def test_what_lies_off_the_curve_of_one_model_is_found(monkeypatch, shift):
    """Runs on one curve, two variants off it by a shift, and one beyond its end."""
    ends = [("first", 0.1, 2.0), ("first", 0.2, 0.4), (stopping.WATCHED, 0.0, 5.0)]
    own = [("a", 0.1, 1.0), ("a", 0.2, 0.3), ("b", 1.0, 3.0), ("a", 0.0, 9.0)]
    rows = [
        {
            "seed": seed,
            "variant": name,
            "beta": beta,
            "final_reverse_kl": kl * (1 + 0.1 * seed),
            "final_gold": truth_at(kl * (1 + 0.1 * seed)) + (shift if name in "ab" else 0.0),
        }
        for seed in range(3)
        for name, beta, kl in (*ends, *own)
    ]
    windows = [
        {"seed": seed, "variant": "first", "update": 0, "gold": truth_at(0.0)} for seed in range(3)
    ]
    recording = SimpleNamespace(finals=pd.DataFrame(rows), curves=pd.DataFrame(windows))
    monkeypatch.setattr(stopping, "recorded", lambda name: recording)
    for variants in (("a",), ("b",), ("a", "b")):
        assert stopping.off_the_curve(*variants).mean == pytest.approx(shift, abs=1e-12)
