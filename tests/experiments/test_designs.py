"""Designs: what they predict is of their variants, and is judged by the numbers alone."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from analysis.evidence import predictions
from analysis.records import designs, recording
from analysis.records.config import TrainConfig
from analysis.records.preset import DERIVED, Preset, predict
from analysis.records.summaries import KLS
from analysis.studies.presets import PRESETS, designed, make_preset

DESIGNED = [name for name, of in PRESETS.items() if of().design is not None]


def finals_of(preset: Preset, values: dict[str, float]) -> pd.DataFrame:
    """One row per run, the level of its variant in ``reward`` and in log ``reverse_kl``."""
    rows = []
    for run in preset.runs:
        level = values.get(run.variant.name, 0.0)
        rows.append(
            {
                "variant": run.variant.name,
                "kl_estimator": run.variant.kl.estimator,
                "beta": run.variant.beta,
                "seed": run.seed,
                "reward": level + 0.001 * (run.seed % 7),
                "reverse_kl": np.exp(level + 0.001 * (run.seed % 7)),
            }
        )
    return pd.DataFrame(rows)


@pytest.mark.parametrize("name", DESIGNED)
def test_a_design_has_enough_seeds_and_starts_and_its_pilots(name: str) -> None:
    """Twenty seeds on five starts, or one on each of ten; of a language model, ten of its start."""
    preset = PRESETS[name]()
    count = designs.starts_of(preset)
    if isinstance(preset.config, TrainConfig):
        assert (len(preset.seeds) >= 20 and count >= 5) or len(preset.seeds) == count == 10
        assert preset.config.start.seed + count < 901, "the starts of the pilots are others"
    else:
        assert len(preset.seeds) >= 10
    assert {sum(seed % count == g for seed in preset.seeds) for g in range(count)} == {
        len(preset.seeds) // count
    }, "each start has as many seeds"
    assert preset.predictions == preset.design.sentences


@pytest.mark.parametrize(
    ("misspelt", "message"),
    [
        ("k2_loss = none: acuracy at 0.3", "metric of .*did you mean 'accuracy'"),
        ("k5_loss = none: reward at 0.3", "variant of .*did you mean 'k3_loss'"),
        ("none = k5_loss: reward at 0.3", "variant of .*did you mean 'k3_loss'"),
        ("none = k2_loss: reward at 0.3 0.5", r"k2_loss has betas \[0.03, .*\], not 0.5 of "),
        ("k2_loss = none: reward at 0", r"k2_loss has betas \[0.03, .*\], not 0 of "),
    ],
)
def test_a_prediction_of_what_is_not_trained_is_refused(misspelt: str, message: str) -> None:
    preset = PRESETS["equal_kl"]()
    design = preset.design.model_copy(update={"predictions": predict({misspelt: "so it is said"})})
    with pytest.raises(ValidationError, match=message) as refused:
        Preset(**{**dict(preset), "design": design})
    assert predict({misspelt: "so it is said"})[0].sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [
        ("kl_axes", "beta", 0.5),
        ("staleness", "beta", 0.5),
        ("three_ways_half_step", "beta", 0.5),
        ("three_ways", "betas", (0.2, 0.5, 2.0)),
        ("three_ways_on_policy", "betas", (0.5,)),
    ],
)
def test_predictions_follow_the_coefficient_of_the_preset(name, parameter, value) -> None:
    usual, other = PRESETS[name](), PRESETS[name](**{parameter: value})
    moved = {(): (), (0.3,): (0.5,)}
    assert [moved[p.betas] for p in usual.design.predictions] == [
        p.betas for p in other.design.predictions
    ]
    assert other.predictions == other.design.sentences


def test_metrics_that_are_derived_are_those_that_a_prediction_may_name() -> None:
    recorded = recording.load(recording.folder_of("process_graded"))
    derived = designs.with_derived(recorded)
    assert set(derived) - set(recorded.finals) == set(DERIVED)


def test_a_prediction_is_spelled_in_one_line() -> None:
    two = predict({"a b < c: reward at 0.1 1": "so"})
    assert [(p.variant, p.expected, p.other, p.betas) for p in two] == [
        (name, "below", "c", (0.1, 1.0)) for name in "ab"
    ]
    assert predict({"a = c: reward": "so"})[0].betas == ()
    with pytest.raises(ValueError, match="a is c"):
        predict({"a is c: reward": "so"})
    with pytest.raises(ValueError, match="not 'the end'"):
        predict({"a = c: reward at the end": "so"})


@pytest.mark.parametrize(
    ("expected", "gap", "outcome"),
    [
        ("above", 0.5, "holds"),
        ("above", -0.5, "refuted"),
        ("below", -0.5, "holds"),
        ("equivalent", 0.01, "holds"),
        ("equivalent", 0.5, "refuted"),
    ],
)
@pytest.mark.parametrize("metric", ["reward", "reverse_kl"])
def test_outcomes_follow_the_numbers(expected, gap, outcome, metric) -> None:
    preset = PRESETS["equal_kl"]()
    prediction = designed.FIGURE2.predictions[0].model_copy(
        update={
            "variant": "k2_loss",
            "other": "none",
            "metric": metric,
            "expected": expected,
            "betas": (0.1, 1.0),
        }
    )
    row = designs.judged(finals_of(preset, {"k2_loss": gap}), prediction, preset.design, 10)
    assert row["outcome"] == outcome and row["mean"] == pytest.approx(gap)
    assert (row["starts"], row["seeds"]) == (10, 20)
    assert designs.margin_of(metric, preset.design) == pytest.approx(
        np.log(1.25) if metric in KLS else 0.03
    )


def test_an_interval_across_the_margin_leaves_a_prediction_open() -> None:
    found = {"mean": 0.02, "low": -0.01, "high": 0.05, "equivalent": 0.2}
    assert designs.outcome(found, "equivalent", 0.03) == "open"
    assert designs.outcome(found, "above", 0.03) == "open"
    assert designs.outcome(found | {"mean": np.nan}, "above", 0.03) == "not estimable"


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("metric", "betas", "variant", "worst"),
    [
        ("reward", (), "k2_loss", 0.0),  # smallest reward of the two variants, largest KL
        ("reward", (0.1, 1.0), "k2_loss", 0.0),
        ("reverse_kl", (0.1, 1.0), "exact_loss", np.exp(0.506)),
    ],
)
def test_a_run_that_is_not_finite_counts_at_the_worst_value(
    number, metric, betas, variant, worst
) -> None:
    """As the stopping rule of every design promises; runs that are not compared set no value."""
    preset = PRESETS["equal_kl"]()
    values = {"k2_loss": 0.5, "k3_loss": -3.0, "k1_loss": 3.0}
    finals = finals_of(preset, values)
    spread = 1.0 + 0.1 * np.random.default_rng(0).standard_normal(len(finals))
    finals["reverse_kl"] *= spread if not betas else 1.0
    prediction = preset.design.predictions[0].model_copy(
        update={"variant": "k2_loss", "other": "exact_loss", "metric": metric, "betas": betas}
    )
    broken = finals.index[(finals["variant"] == variant) & (finals["beta"] == 1.0)][3]
    columns = [metric] if betas else [designs.EQUAL, metric]
    by_hand, lost = finals.copy(), finals.copy()
    compared = finals[finals["variant"].isin(("k2_loss", "exact_loss"))].drop(index=broken)
    by_hand.loc[broken, metric] = worst
    if not betas:
        by_hand.loc[broken, designs.EQUAL] = compared[designs.EQUAL].max()
    lost.loc[broken, columns] = number
    found, expected, whole = (
        designs.judged(runs, prediction, preset.design, 10) for runs in (lost, by_hand, finals)
    )
    assert found == expected
    assert found["seeds"] == 20 and found["mean"] != pytest.approx(whole["mean"], abs=1e-4)


def test_finite_runs_are_compared_as_they_are() -> None:
    finals = finals_of(PRESETS["equal_kl"](), {"k2_loss": 0.5})
    pd.testing.assert_frame_equal(designs.at_worst(finals, "reward", "reverse_kl"), finals)


def test_a_design_may_equal_the_final_kl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fit is that of the column it names, and no other."""
    recorded = recording.load(recording.folder_of("equal_kl"))
    finals = recorded.finals.rename(columns={"reverse_kl": "final_reverse_kl"})
    finals = finals.assign(reverse_kl=1.0, final_reward=finals["reward"])
    kept = recorded.preset.design
    named = kept.model_copy(update={"equal": "final_reverse_kl"})
    (asked,) = [p for p in kept.predictions if (p.variant, p.betas) == ("k2_loss", ())]
    moved = asked.model_copy(update={"metric": "final_reward"})
    found = designs.judged(finals, moved, named, 10)
    plain = designs.judged(recorded.finals, asked, kept, 10)
    assert found["mean"] == pytest.approx(plain["mean"])
    assert found["kl_low"] == pytest.approx(plain["kl_low"])


def test_a_final_metric_wants_a_measurement() -> None:
    preset = make_preset("equal_kl_half_step", {})
    assert preset.config.final_answers == 1000
    fields = preset.model_dump()
    fields["config"]["final_answers"] = 0
    with pytest.raises(ValueError, match="final_answers is 0"):
        type(preset).model_validate(fields)


def test_which_designs_replicate_a_pilot() -> None:
    """As they were read one by one: a pilot of another configuration is no replication."""
    other = {"smollm2_equal_kl", "smollm2_sampled_losses", "smollm2_coefficient_one"}
    other |= {"equal_kl_wide", "long_completions", "long_completions_128"}
    other |= {"aggregation_length", "aggregation_length_112", "resets", "polyak", "top_k"}
    other |= {"stale_weighted_k3", "equal_kl_half_step", "proxy_1k", "proxy_5k", "proxy_20k"}
    other |= {"smollm2_proxy"}
    found = {name: predictions.replicates(name) for name in predictions.OTHERWISE}
    assert {name for name, same in found.items() if not same} == other
