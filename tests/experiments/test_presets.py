"""The presets: each trains, its variants are what they are called, and a misfit is named."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest
import torch

from analysis.records.config import Run, TrainConfig
from analysis.records.metrics import METRICS, PARTIAL_METRICS
from analysis.records.preset import Preset
from analysis.records.variants import Variant
from analysis.studies.presets import FIRST_SEED, PRESETS, distillation, make_preset
from analysis.studies.presets.kl_terms import quick
from analysis.sweeps import in_process
from analysis.training.trainer import PopulationTrainer

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = [name for name, of in PRESETS.items() if isinstance(of().config, TrainConfig)]


def shortened(name: str, updates: int = 2, *, start: int = 1) -> Preset:
    """One seed of a preset for a few updates, from starts of a few steps."""
    preset = make_preset(name, {"num_seeds": 1, "updates": updates})
    config = preset.config
    changes = {
        "log_every": 1,
        "num_prompts": 4,
        "start": config.start.model_copy(update={"updates": start}),
    }
    if config.teacher is not None:
        of_teacher = config.teacher.start.model_copy(update={"updates": 6})
        changes["teacher"] = config.teacher.model_copy(update={"start": of_teacher})
    if config.reward_model is not None:
        few = {"labels": 40, "updates": 3}
        changes["reward_model"] = config.reward_model.model_copy(update=few)
    return preset.model_copy(update={"config": config.model_copy(update=changes)})


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_two_updates_of_every_preset_are_finite(name: str) -> None:
    preset = shortened(name)
    result = in_process.run(preset)
    assert preset.name == name and preset.predictions and not result.failures
    assert len(result.curves) == 2 * len(preset.variants)
    measured = [metric for metric in METRICS if metric not in PARTIAL_METRICS]
    # a group that waits for its budget gives no completion, and so no metric of one
    curves = result.curves[~result.curves["variant"].str.startswith("budget")]
    assert np.isfinite(curves[measured].to_numpy()).all()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_run_again_on_other_seeds(name: str) -> None:
    usual, other = make_preset(name, {}), make_preset(name, {FIRST_SEED: 90_000})
    assert other.seeds == tuple(range(90_000, 90_000 + len(usual.seeds)))
    assert other == usual.model_copy(update={"seeds": other.seeds}), "nothing else changes"


def test_no_two_presets_share_seeds_unless_one_takes_them_from_the_other() -> None:
    seeds = {name: set(make_preset(name, {}).seeds) for name in PRESETS}
    named = {name: set(inspect.unwrap(of).__code__.co_names) for name, of in PRESETS.items()}
    direct = {name: ({name} | named[name]) & set(PRESETS) for name in PRESETS}
    taken = {name: set().union(*map(direct.get, names)) for name, names in direct.items()}
    for one, other in itertools.combinations(seeds, 2):
        another_policy = (one in TINY) != (other in TINY)
        compared = taken[one] & taken[other]
        assert another_policy or compared or seeds[one].isdisjoint(seeds[other]), (
            f"{one} and {other} share seeds: take a range that is free, or the other's by name"
        )
    assert taken["three_ways_on_policy"] == {"three_ways_on_policy", "three_ways"}
    searched = seeds["quick"]
    recorded = [name for name in TINY if name != "quick"]
    assert all(seeds[name].isdisjoint(searched) and len(seeds[name]) >= 10 for name in recorded)


def test_a_first_seed_goes_with_other_parameters() -> None:
    assert make_preset("quick", {"num_seeds": 2, FIRST_SEED: 7}).seeds == (7, 8)


def test_every_preset_takes_another_number_of_seeds_and_what_its_runs_share() -> None:
    usual = make_preset("objectives", {})
    changes = {"num_iterations": 2, "learning_rate": 1, "updates": 30}
    other = make_preset("objectives", {"num_seeds": 3, "tau": 2.0, **changes})
    assert other.seeds == usual.seeds[:3] and other.variants[-1].objective.tau == 2.0
    shared = {"num_iterations": 2, "learning_rate": 1.0, "updates": 30}
    assert other.config == usual.config.model_copy(update=shared)


def test_the_weights_of_the_language_model_are_named() -> None:
    kinds = {w: make_preset("smollm2", {"weights": w}) for w in ("hub", "packaged", "/a/folder")}
    assert {w: preset.config.model.kind for w, preset in kinds.items()} == {
        "hub": "hub",
        "packaged": "packaged",
        "/a/folder": "folder",
    }
    assert kinds["hub"] == make_preset("smollm2", {})


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("equal_k", {}, "did you mean 'equal_kl'"),
        ("quick", {"bta": 0.1}, "did you mean 'beta'"),
        ("quick", {"beta": "much"}, "beta: Input should be a valid number"),
        ("quick", {"beta": float("nan")}, "beta: Input should be a finite number"),
        ("equal_kl", {"num_seeds": 0}, "num_seeds: Input should be greater than or equal to 1"),
        ("quick", {"num_seeds": 0}, "num_seeds must be at least 1, not 0"),
        ("equal_kl", {"num_seeds": 10_001}, "num_seeds must be at most 10,000, not 10,001"),
        ("quick", {"num_seeds": 10**12}, "num_seeds must be at most 10,000"),
        ("equal_kl", {"updates": 1.5}, "updates: Input should be a valid integer"),
        ("equal_kl", {"updates": 0}, "updates: Input should be greater than or equal to 1"),
        ("equal_kl", {"updates": True}, "updates: Input should be a valid integer"),
        ("equal_kl", {"updates": "3_0"}, "updates: Input should be a valid integer"),
        ("quick", {"beta": True}, "beta: Input should be a valid number"),
        ("quick", {"num_seeds": True}, "num_seeds: Input should be a valid integer"),
        ("equal_kl", {FIRST_SEED: "٣"}, "first_seed: Input should be a valid integer"),
        ("equal_kl", {"lerning_rate": 0.1}, "did you mean 'learning_rate'"),
        ("equal_kl", {"learning_rate": -1.0}, "learning_rate: Input should be greater than 0"),
        ("equal_kl", {"learning_rate": float("nan")}, "learning_rate: Input should be a finite"),
        ("equal_kl", {"num_minibatches": 5}, "num_minibatches=5 must divide"),
        ("stale_coefficients", {"betas": 0.1}, "betas: Input should be a valid tuple"),
        ("quick", {"beta": -0.1}, "beta: Input should be greater than or equal to 0"),
        (
            "stale_coefficients",
            {"betas": [0.1, -1]},
            "betas.1: Input should be greater than or equal to 0",
        ),
        ("quick", {"first_sed": 1}, "did you mean 'first_seed'"),
        ("quick", {FIRST_SEED: -1}, "first_seed: Input should be greater than or equal to 0"),
        ("quick", {FIRST_SEED: 1.5}, "first_seed: Input should be a valid integer"),
    ],
)
def test_what_does_not_fit_is_named(name: str, overrides: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_preset(name, overrides)


def test_a_preset_that_is_called_checks_its_parameters() -> None:
    with pytest.raises(ValueError, match=r"beta\n  Input should be a finite number"):
        quick(beta=float("nan"))


def test_one_sample_distillation_in_the_reward_is_the_k2_loss() -> None:
    preset = shortened("distillation", start=3)
    trainer = PopulationTrainer(preset.config, [Run(variant=v, seed=1) for v in preset.variants])
    drawn = trainer.rollout(0)
    losses = trainer.losses(trainer.batch(drawn), caches=drawn.caches).losses
    (gradient,) = torch.autograd.grad(losses.sum(), trainer.weights)
    found = dict(zip([variant.name for variant in preset.variants], gradient, strict=True))
    assert torch.allclose(found["opd_immediate"], found["k2_loss"], rtol=1e-4, atol=1e-6)
    for other in ("opd_to_go", "k3_loss", "reverse_exact"):
        assert (found["opd_immediate"] - found[other]).norm() > 0.1 * found["k2_loss"].norm()


def test_lessons_do_not_read_the_reward_and_guided_variants_do() -> None:
    preset = make_preset("distillation", {})
    assert preset.variants[0] == distillation.GRPO
    assert all(variant.advantage.baseline == "zero" for variant in preset.variants[1:])
    variants = make_preset("kdrl", {"updates": 80}).variants
    guided = {v.name: v for v in variants if v.name.startswith("kdrl")}
    assert all(v.advantage.baseline == "group_normalise" for v in guided.values())
    assert len({v.distillation for v in guided.values()}) == len(guided) == 6
    annealed = guided["kdrl_annealed"].distillation
    assert (annealed.weight, annealed.weight_end, annealed.anneal_updates) == (0.3, 0.0, 40)


def test_each_variant_of_the_cumulative_table_adds_one_thing() -> None:
    variants = make_preset("dapo", {}).variants
    for before, after in itertools.pairwise(variants):
        assert len(_changed(before, after)) == 1
    assert len(_changed(variants[0], variants[-1])) == 5


def _changed(before: Variant, after: Variant) -> set[str]:
    """Fields, of any part of the variants, in which they differ; the label is none."""
    old, new = (_flat(variant) for variant in (before, after))
    changed = {field for field in new if old.get(field) != new[field]}
    if {"shaping.weight", "shaping.buffer"} & changed:  # belong to the one length reward
        changed -= {"shaping.weight", "shaping.buffer"}
    return changed


def _flat(variant: Variant) -> dict[str, object]:
    fields = variant.model_dump(exclude={"label", "distillation"})
    parts = {part: values for part, values in fields.items() if isinstance(values, dict)}
    return {f"{part}.{name}": v for part, values in parts.items() for name, v in values.items()}


@pytest.mark.slow
def test_a_weight_on_fresh_samples_changes_nothing_and_on_stale_ones_does() -> None:
    curves = in_process.run(shortened("staleness", 6, start=120)).curves
    norms = curves.set_index(["variant", "update"])["gradient_norm"]
    assert (norms["k2_lag_0"] == norms["k2_detached_lag_0"]).all()
    differ = (norms["k2_lag_4"] - norms["k2_detached_lag_4"]).abs()
    assert differ[0] == 0  # the first update has no older policy to sample from
    assert differ.loc[5] > 0


def test_the_large_batch_draws_in_a_quarter_of_its_updates_what_the_three_ways_draw() -> None:
    several, large = (make_preset(n, {}).config for n in ("three_ways", "three_ways_on_policy"))
    drawn = [c.updates * c.num_prompts * c.group_size for c in (several, large)]
    assert 4 * drawn[0] == drawn[1]
    assert large.num_iterations == large.num_minibatches == 1
