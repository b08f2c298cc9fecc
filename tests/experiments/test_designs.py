"""Designs: what they predict is of their variants, and is judged by the numbers alone."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from analysis.experiments import designs
from analysis.experiments.preset import Preset
from analysis.experiments.presets import PRESETS, designed
from analysis.experiments.summaries import KLS

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
def test_a_design_has_twenty_seeds_on_ten_starts_and_its_pilots(name: str) -> None:
    preset = PRESETS[name]()
    starts = preset.config.start
    assert len(preset.seeds) >= 20 and starts.count >= 10
    assert {
        sum(seed % starts.count == g for seed in preset.seeds) for g in range(starts.count)
    } == {len(preset.seeds) // starts.count}, "each start has as many seeds"
    assert starts.seed + starts.count < 901, "the starts of the pilots are others"
    assert preset.predictions == preset.design.sentences
    betas = {variant.beta for variant in preset.variants}
    for prediction in preset.design.predictions:
        with_kl = {v.name for v in preset.variants if v.beta}
        if {prediction.variant, prediction.other} & with_kl:
            assert set(prediction.betas) <= betas, prediction.sentence


def test_a_prediction_of_an_unknown_variant_is_refused() -> None:
    preset = PRESETS["equal_kl"]()
    prediction = preset.design.predictions[0].model_copy(update={"variant": "k5_loss"})
    design = preset.design.model_copy(update={"predictions": (prediction,)})
    with pytest.raises(ValidationError, match="k5_loss"):
        Preset(**{**dict(preset), "design": design})


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
