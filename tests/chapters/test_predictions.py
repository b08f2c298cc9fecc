"""Designed recordings: every prediction judged again from the stored rows, by other code."""

from __future__ import annotations

import csv
import math
from functools import lru_cache

import numpy as np
import pytest
from scipy import stats

from analysis.chapters import ch16_objectives, ch18_distillation
from analysis.chapters.ch04_grpo.at_equal_kl import SETTINGS
from analysis.chapters.ch07_off_policy import trained
from analysis.evidence import predictions
from analysis.evidence.names import distillation, kl_terms, objectives, off_policy
from analysis.evidence.recorded import recorded, recorded_runs
from analysis.records import recording
from analysis.records.config import TrainConfig
from analysis.studies.presets import PRESETS
from tests.experiments import dense_mixed_model

DESIGNED = [
    name
    for name, of in PRESETS.items()
    if of().design is not None and (recording.RESULTS / f"{name}_cpu").is_dir()
]
STARTS = 10
LOGARITHMS = ("reverse_kl", "teacher_kl", "final_reverse_kl")


#: Recording -> the folder of the runs that it is compared with, on its seeds.
BESIDE = dict.fromkeys(
    ("smollm2_sampled_losses", "smollm2_coefficient_one"), "smollm2_equal_kl_cuda"
) | {"polyak": "resets_cpu", "proxy_controls": "proxy_5k_cpu"}
#: In place of a coefficient: of a variant that has one alone.
END = 0.0


@lru_cache(maxsize=4)  # a test asks for the tables of one preset, again and again
def rows_of(preset: str, table: str = "final") -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    for folder in filter(None, (f"{preset}_cpu", BESIDE.get(preset))):
        with (recording.RESULTS / folder / f"{table}.csv").open(newline="") as lines:
            seeds = {row["seed"] for row in rows}
            rows += [row for row in csv.DictReader(lines) if not seeds or row["seed"] in seeds]
    return rows


@lru_cache(maxsize=4)
def by_variant(preset: str, table: str) -> dict[str, list[dict[str, str]]]:
    rows: dict[str, list[dict[str, str]]] = {}
    for row in rows_of(preset, table):
        rows.setdefault(row["variant"], []).append(row)
    return rows


def by_seed(preset: str, variant: str, beta: float, metric: str) -> dict[int, float]:
    """A seed's value; a variant without a KL term stands for itself at every coefficient.

    At the end a variant has one coefficient, which is then its own.
    """
    whole_run = {"average": "accuracy", "log_peak_gradient": "gradient_norm", "peak_gold": "gold"}
    if metric in LIMITS:
        return stopped_before(LIMITS[metric], preset, variant, beta)
    values: dict[int, list[float]] = {}
    for row in by_variant(preset, "curves" if metric in whole_run else "final")[variant]:
        if row["kl_estimator"] == "none" or beta in (END, float(row["beta"])):
            if metric == "excess":
                value = float(row["wrong_length"]) - float(row["right_length"])
            else:
                value = float(row[whole_run.get(metric, metric)])
            values.setdefault(int(row["seed"]), []).append(value)
    if metric == "log_peak_gradient":
        return {seed: math.log(max(windows)) for seed, windows in values.items()}
    if metric == "peak_gold":
        return {seed: max(windows) for seed, windows in values.items()}
    return {seed: sum(windows) / len(windows) for seed, windows in values.items()}


#: Metric -> the column that may not exceed how much: nats, or times a spread's first window.
LIMITS = {"budget_gold": ("reverse_kl", 0.1), "spread_gold": ("spread", 1.5)}


def stopped_before(
    limit: tuple[str, float], preset: str, variant: str, beta: float
) -> dict[int, float]:
    """The gold of the last of a run's windows before one exceeds a limit."""
    golds: dict[int, float] = {}
    ended: set[int] = set()
    column, most = limit
    units: dict[int, float] = {}
    rows = by_variant(preset, "curves")[variant]
    for row in sorted(rows, key=lambda row: int(row["update"])):
        wanted = row["kl_estimator"] == "none" or float(row["beta"]) == beta
        seed = int(row["seed"])
        if wanted and seed not in ended:
            unit = units.setdefault(seed, float(row[column]) if column == "spread" else 1.0)
            if float(row[column]) > most * unit:
                ended.add(seed)
            else:
                golds[seed] = float(row["gold"])
    return golds


@pytest.mark.parametrize("preset", DESIGNED)
def test_predictions_at_equal_coefficients_are_scipy_s_of_the_stored_rows(preset: str) -> None:
    table = predictions.judged(preset)
    for number, prediction in enumerate(recorded_runs(preset).preset.design.predictions):
        if not prediction.betas:
            continue
        gaps: dict[int, list[float]] = {}
        log = math.log if prediction.metric in LOGARITHMS else float
        for beta in prediction.betas:
            one, other = (
                by_seed(preset, name, beta, prediction.metric)
                for name in (prediction.variant, prediction.other)
            )
            assert len(one) == len(recorded_runs(preset).preset.seeds) >= 5
            assert one.keys() == other.keys()
            for seed in one:
                gaps.setdefault(seed % STARTS, []).append(log(one[seed]) - log(other[seed]))
        means = [sum(values) / len(values) for values in gaps.values()]
        ends = stats.ttest_1samp(means, 0.0).confidence_interval()
        found = table.iloc[number]
        expected = (np.mean(means), ends.low, ends.high)
        assert tuple(found[["mean", "low", "high"]]) == pytest.approx(expected, abs=1e-9)
        margin = recorded_runs(preset).preset.design.margin
        margin = 0.2231435513 if prediction.metric in LOGARITHMS else margin
        sides = [
            stats.ttest_1samp(np.array(means) + margin, 0.0, alternative="greater").pvalue,
            stats.ttest_1samp(np.array(means) - margin, 0.0, alternative="less").pvalue,
        ]
        holds = {
            "above": ends.low > 0,
            "below": ends.high < 0,
            "equivalent": max(sides) < 0.05,
        }[prediction.expected]
        assert (found["outcome"] == "holds") == holds, prediction.sentence


@pytest.mark.parametrize(
    "preset", [name for name in DESIGNED if name in (*SETTINGS, "smollm2_coefficient_one")]
)
def test_equal_kl_is_a_dense_fit_of_the_stored_rows(preset: str) -> None:
    rows, table = rows_of(preset), predictions.judged(preset)
    design = recorded_runs(preset).preset.design
    number, prediction = next(
        (n, p) for n, p in enumerate(design.predictions) if not p.betas and p.variant == "k1_reward"
    )
    kept = [r for r in rows if r["variant"] in (prediction.variant, prediction.other)]
    x = np.log([float(r[design.equal]) for r in kept])
    y = np.array([float(r[prediction.metric]) for r in kept])
    one = np.array([float(r["variant"] == prediction.variant) for r in kept])
    seed = np.array([int(r["seed"]) for r in kept])
    centre = x.mean()
    coefficients, covariance = dense_mixed_model.coefficients(x - centre, y, one, seed, STARTS)
    ends = [np.percentile(x[one == which], (10, 90)) for which in (1, 0)]
    at = np.linspace(max(e[0] for e in ends), min(e[1] for e in ends), 20001) - centre
    powers = np.array([1.0, at.mean(), (at**2).mean()])
    contrast = np.concatenate([powers, -powers])
    mean, error = contrast @ coefficients, math.sqrt(contrast @ covariance @ contrast)
    reach = stats.t.ppf(0.975, STARTS - 1) * error
    found = table.iloc[number]
    assert found["mean"] == pytest.approx(mean, abs=5e-4)
    assert (found["high"] - found["low"]) / 2 == pytest.approx(reach, rel=0.03)


@pytest.mark.parametrize("preset", DESIGNED)
def test_outcomes_are_those_that_the_prose_states(preset: str, monkeypatch) -> None:
    predictions.check_outcomes([preset])
    said = predictions.OTHERWISE.get(preset, {})
    monkeypatch.setitem(predictions.OTHERWISE, preset, said | {"a = b: reward at 1": "open"})
    with pytest.raises(ValueError, match="a = b: reward at 1: the text says open, the runs noth"):
        predictions.check_outcomes([preset])
    monkeypatch.setitem(predictions.OTHERWISE, preset, {})
    if said:
        with pytest.raises(ValueError, match="the text says holds, the runs"):
            predictions.check_outcomes([preset])


@pytest.mark.parametrize("preset", DESIGNED)
def test_a_tenth_of_the_runs_was_trained_again(preset: str) -> None:
    run = recorded_runs(preset)
    tenth = math.ceil(len(run.preset.runs) / 10)
    again = run.manifest.get("reproduced", {"runs": 0})["runs"]
    assert again >= tenth, f"analysis reproduce {preset}_cpu --runs {tenth} --note"
    assert not run.failures


@pytest.mark.parametrize(
    "preset",  # a language model has one start
    [n for n in DESIGNED if n not in BESIDE and isinstance(PRESETS[n]().config, TrainConfig)],
)
def test_rows_of_starts_are_the_means_of_their_seeds(preset: str) -> None:
    runs, starts = recorded_runs(preset), recorded(preset)
    each = len(runs.preset.seeds) // STARTS
    assert len(starts.finals) * each == len(runs.finals)
    assert set(starts.finals["seed"]) == set(range(STARTS))
    first = starts.finals.iloc[0]
    own = runs.finals[
        (runs.finals["variant"] == first["variant"])
        & (runs.finals["beta"] == first["beta"])
        & (runs.finals["seed"] % STARTS == first["seed"])
    ]
    assert first["accuracy"] == pytest.approx(own["accuracy"].mean(), abs=1e-12)
    assert len(own) == each


@pytest.mark.parametrize(
    ("names", "presets"),
    [
        (objectives.NAMES, ch16_objectives.DESIGNS),
        (off_policy.NAMES, trained.RUNS),
        (distillation.NAMES, ch18_distillation.RUNS),
        (kl_terms.NAMES, (*SETTINGS, "kl_axes")),
    ],
)
def test_every_variant_of_a_page_s_predictions_has_a_name(names, presets) -> None:
    for preset in presets:
        table = predictions.judged(preset)
        assert {*table["variant"], *table["other"]} <= set(names), preset
