"""The presets on samples that are not the policy's own: what their arms are, and that they run."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.experiments.ablations import ablation
from analysis.experiments.ablations.catalogue import CATALOGUE, make_preset
from analysis.experiments.ablations.methods import off_policy, three_ways
from analysis.training.config import StartConfig
from analysis.training.metrics import METRICS, PARTIAL_METRICS

NAMES = (
    "staleness",
    "stale_front",
    "three_ways",
    "three_ways_half_step",
    "three_ways_on_policy",
    "stale_masking",
    "mismatch",
    "partial_rollouts",
)


def short(name: str, updates: int, *, start: int = 1) -> ablation.Ablation:
    """One seed of a preset for a few updates, from a start of a few steps."""
    preset = make_preset(name, {"num_seeds": 1})
    changes = {
        "updates": updates,
        "log_every": 1,
        "num_prompts": 4,
        "start": StartConfig(updates=start),
    }
    config = preset.config.model_copy(update=changes)
    return ablation.run(preset.model_copy(update={"config": config}))


def arms_of(name: str) -> dict:
    return {(arm.name, arm.beta): arm for arm in make_preset(name, {}).arms}


@pytest.mark.parametrize("name", NAMES)
def test_two_updates_of_every_preset_are_finite(name):
    result = short(name, 2)
    assert not result.failures
    # a group that waits for its budget gives no completion, and so no metric of one
    measured = [metric for metric in METRICS if metric not in PARTIAL_METRICS]
    arms = result.curves[~result.curves["arm"].str.startswith("budget")]
    assert np.isfinite(arms[measured].to_numpy()).all()
    assert result.preset.predictions
    assert len(make_preset(name, {}).seeds) >= 10


def test_every_preset_of_the_module_is_in_the_catalogue():
    modules = {name: three_ways if name.startswith("three") else off_policy for name in NAMES}
    assert all(CATALOGUE[name] is getattr(module, name) for name, module in modules.items())


def test_lags_and_weights_are_crossed():
    arms = arms_of("staleness")
    assert len(arms) == 3 * 6
    arm = arms["k3_attached_lag_16", 0.3]
    assert (arm.kl.estimator, arm.kl.weighting, arm.sampler.staleness) == ("k3", "attached", 16)


def test_a_weight_on_fresh_samples_changes_nothing_and_on_stale_ones_does():
    curves = short("staleness", 6, start=120).curves.set_index(["arm", "update"])["gradient_norm"]
    assert (curves["k2_lag_0"] == curves["k2_detached_lag_0"]).all()
    differ = (curves["k2_lag_4"] - curves["k2_detached_lag_4"]).abs()
    assert differ[0] == 0  # the first update has no older policy to sample from
    assert differ.loc[5] > 0


def test_merged_arms_hold_their_kl_in_the_objective():
    for (name, beta), arm in arms_of("three_ways").items():
        if not name.startswith("merged"):
            continue
        assert arm.objective.kind == "grpo_off_policy"
        assert arm.objective.reading == name.split("_")[1]
        assert (arm.objective.epsilon_high > 1) == name.endswith("wide")
        assert beta > 0


def test_the_large_batch_draws_in_a_quarter_of_its_updates_what_the_three_ways_draw():
    several = make_preset("three_ways", {}).config
    large = make_preset("three_ways_on_policy", {}).config
    drawn = [c.updates * c.num_prompts * c.group_size for c in (several, large)]
    assert 4 * drawn[0] == drawn[1]
    assert large.num_iterations == large.num_minibatches == 1


def test_masks_are_named_by_their_threshold():
    arms = arms_of("stale_masking")
    assert arms["reinforce_mask_0.1", 0.0].correction.sequence_mask_delta == 0.1
    assert arms["reinforce", 0.0].correction.sequence_mask_delta is None
    assert arms["fresh", 0.0].sampler.staleness == 0
    assert {arm.sampler.staleness for name, arm in arms.items() if name[0] != "fresh"} == {16}


def test_every_corrected_arm_has_an_uncorrected_one_with_its_sampler():
    arms = {name: arm for (name, _), arm in arms_of("mismatch").items()}
    for name, arm in arms.items():
        sampler = next((s for s in ("cold", "hot", "top_p") if name.startswith(s)), None)
        if sampler is not None:
            assert arm.sampler == arms[f"{sampler}_uncorrected"].sampler
    assert arms["top_p_keep_mask"].correction.keep_sampling_mask


def test_budgets_say_what_they_train_on():
    arms = {name: arm for (name, _), arm in arms_of("partial_rollouts").items()}
    assert arms["budget_4_current"].sampler.train_on == "current"
    assert arms["budget_8_all"].sampler.budget == 8
    assert arms["whole"].sampler.budget == 0
