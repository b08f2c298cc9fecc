"""Presets by name, and their parameters."""

from __future__ import annotations

import pytest

from analysis.experiments.ablations import presets
from analysis.experiments.ablations.catalogue import CATALOGUE, FIRST_SEED, make_preset
from analysis.training.config import StartConfig, TrainConfig
from analysis.training.trainer import PopulationTrainer


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_preset_trains_two_updates(name: str) -> None:
    preset = make_preset(name, {"updates": 2, "num_seeds": 1})
    assert preset.name == name and preset.predictions and preset.config.updates == 2
    if isinstance(preset.config, TrainConfig):  # the others need a GPU or are tried elsewhere
        fields = preset.config.model_dump() | {"start": StartConfig(updates=1), "log_every": 1}
        run = PopulationTrainer(TrainConfig(**fields), preset.members).run()
        assert not run.failures and len(run.members) == len(preset.arms)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_preset_can_be_run_again_on_other_seeds(name: str) -> None:
    usual, other = make_preset(name, {}), make_preset(name, {FIRST_SEED: "90000"})
    assert other.seeds == tuple(range(90_000, 90_000 + len(usual.seeds)))
    assert other == usual.model_copy(update={"seeds": other.seeds}), "nothing else changes"


def test_a_first_seed_goes_with_other_parameters() -> None:
    assert make_preset("quick", {"num_seeds": 2, FIRST_SEED: 7}).seeds == (7, 8)


def test_the_recorded_presets_are_those_of_the_catalogue() -> None:
    assert make_preset("full", {}).model_dump() == presets.FULL.model_dump()
    assert make_preset("half_step", {}).model_dump() == presets.HALF_STEP.model_dump()
    assert make_preset("quick", {}) == presets.quick()


def test_figure_2_has_the_published_sizes_and_arms() -> None:
    preset = make_preset("figure2", {})
    assert (preset.config.num_prompts, preset.config.group_size) == (12, 6)
    assert {arm.beta for arm in preset.arms if arm.kl.estimator != "none"} == {0.04}
    assert {"none", "k1_reward", "k2_loss", "k3_loss"} <= {arm.name for arm in preset.arms}


def test_the_weights_of_the_language_model_are_named() -> None:
    kinds = {w: make_preset("smollm2", {"weights": w}) for w in ("hub", "packaged", "/a/folder")}
    assert {w: preset.config.model.kind for w, preset in kinds.items()} == {
        "hub": "hub",
        "packaged": "packaged",
        "/a/folder": "folder",
    }
    assert kinds["hub"] == make_preset("smollm2", {})


def test_a_beta_front_has_every_arm_at_every_beta() -> None:
    preset = make_preset("beta_front", {"betas": [0.5, 2]})
    points = {(arm.name, arm.beta) for arm in preset.arms}
    assert len(points) == 2 * 7 and ("k2_loss", 2.0) in points
    assert preset.seeds == presets.FULL.seeds, "its points belong to the curves of the full preset"


def test_presets_meant_as_evidence_share_no_seed_with_the_search() -> None:
    searched = set(presets.quick().seeds)
    for name in ("full", "half_step", "figure2", "beta_front"):
        assert searched.isdisjoint(make_preset(name, {}).seeds)
        assert len(make_preset(name, {}).seeds) >= 10


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("ful", {}, "did you mean 'full'"),
        ("quick", {"bta": 0.1}, "did you mean 'beta'"),
        ("quick", {"beta": "much"}, "beta: Input should be a valid number"),
        ("quick", {"beta": float("nan")}, "beta: Input should be a finite number"),
        ("full", {"num_seeds": 0}, "seeds: Tuple should have at least 1 item"),
        ("full", {"num_seeds": 10_001}, "num_seeds must be at most 10,000, not 10,001"),
        ("quick", {"num_seeds": 10**12}, "num_seeds must be at most 10,000"),
        ("full", {"updates": 1.5}, "updates: Input should be a valid integer"),
        ("full", {"updates": 0}, "updates: Input should be greater than or equal to 1"),
        ("beta_front", {"betas": 0.1}, "betas: Input should be a valid tuple"),
        ("quick", {"beta": -0.1}, "beta: Input should be greater than or equal to 0"),
        ("beta_front", {"betas": [0.1, -1]}, "betas.1: Input should be greater than or equal to 0"),
        ("quick", {"first_sed": 1}, "did you mean 'first_seed'"),
        ("quick", {FIRST_SEED: -1}, "first_seed: Input should be greater than or equal to 0"),
        ("quick", {FIRST_SEED: 1.5}, "first_seed: Input should be a valid integer"),
    ],
)
def test_what_does_not_fit_is_named(name: str, overrides: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_preset(name, overrides)
