"""The presets on objectives and rewards: every arm trains, and the recordings are of these."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from analysis.experiments.ablations import ablation
from analysis.experiments.ablations.catalogue import make_preset
from analysis.training.arms import Arm
from analysis.training.config import StartConfig
from analysis.training.metrics import METRICS, PARTIAL_METRICS

NAMES = (
    "objectives",
    "clip_higher",
    "near_ties",
    "length_growth",
    "dapo",
    "process",
    "process_graded",
)


@pytest.mark.parametrize("name", NAMES)
def test_two_updates_of_every_arm_are_finite(name):
    preset = make_preset(name, {"updates": 2, "num_seeds": 1})
    config = preset.config.model_copy(
        update={"start": StartConfig(updates=1), "log_every": 1, "num_prompts": 4}
    )
    result = ablation.run(preset.model_copy(update={"config": config}))
    assert not result.failures
    assert len(result.curves) == 2 * len(preset.arms)
    measured = [metric for metric in METRICS if metric not in PARTIAL_METRICS]
    assert np.isfinite(result.curves[measured].to_numpy()).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_predicts_and_has_seeds_for_an_interval(name):
    preset = make_preset(name, {})
    assert len(preset.seeds) >= 10
    assert preset.predictions


def test_no_two_presets_share_seeds_unless_they_are_compared():
    seeds = {name: set(make_preset(name, {}).seeds) for name in NAMES}
    assert seeds.pop("process_graded") == seeds["process"]
    together = [seed for group in seeds.values() for seed in group]
    assert len(together) == len(set(together))
    assert min(together) > 2  # searched


def test_each_arm_of_the_cumulative_table_adds_one_thing():
    arms = make_preset("dapo", {}).arms
    for before, after in itertools.pairwise(arms):
        assert len(_changed(before, after)) == 1
    assert len(_changed(arms[0], arms[-1])) == 5


def _changed(before: Arm, after: Arm) -> set[str]:
    """Fields, of any part of the arms, in which they differ; the label is none."""
    old, new = (_flat(arm) for arm in (before, after))
    changed = {field for field in new if old.get(field) != new[field]}
    if {"shaping.weight", "shaping.buffer"} & changed:  # belong to the one length reward
        changed -= {"shaping.weight", "shaping.buffer"}
    return changed


def _flat(arm: Arm) -> dict[str, object]:
    fields = arm.model_dump(exclude={"label", "distillation"})
    return {
        f"{part}.{name}": value
        for part, values in fields.items()
        if isinstance(values, dict)
        for name, value in values.items()
    }
