"""The presets of the distillation chapter: each trains, and its arms are what they are called."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from analysis.experiments.ablations import ablation
from analysis.experiments.ablations.catalogue import make_preset
from analysis.experiments.ablations.methods import distillation
from analysis.training.config import Member, TeacherConfig
from analysis.training.metrics import METRICS, PARTIAL_METRICS
from analysis.training.trainer import PopulationTrainer

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("distillation", "distillation_sparse", "weak_teacher", "kdrl", "long_to_short")


def shortened(name: str, updates: int = 2):
    """The preset at one seed, from starts of a few updates."""
    preset = make_preset(name, {"num_seeds": 1, "updates": updates})
    config = preset.config
    start = config.start.model_copy(update={"updates": 3})
    teacher = TeacherConfig(start=config.teacher.start.model_copy(update={"updates": 6}))
    changes = {"start": start, "teacher": teacher, "log_every": 1, "num_prompts": 4}
    return preset.model_copy(update={"config": config.model_copy(update=changes)})


@pytest.mark.parametrize("name", NAMES)
def test_two_updates_of_every_preset_are_finite(name):
    preset = shortened(name)
    result = ablation.run(preset)
    assert not result.failures
    assert len(result.curves) == 2 * len(preset.arms)
    measured = [metric for metric in METRICS if metric not in PARTIAL_METRICS]
    assert np.isfinite(result.curves[measured].to_numpy()).all()
    assert preset.predictions


def gradients(name: str) -> dict[str, torch.Tensor]:
    """Of the first update, per arm."""
    preset = shortened(name)
    trainer = PopulationTrainer(preset.config, [Member(arm=a, seed=1) for a in preset.arms])
    drawn = trainer.rollout(0)
    losses = trainer.losses(trainer.batch(drawn), pasts=drawn.pasts).losses
    (gradient,) = torch.autograd.grad(losses.sum(), trainer.weights)
    return dict(zip([arm.name for arm in preset.arms], gradient, strict=True))


def test_one_sample_distillation_in_the_reward_is_the_k2_loss():
    found = gradients("distillation")
    assert torch.allclose(found["opd_immediate"], found["k2_loss"], rtol=1e-4, atol=1e-6)
    for other in ("opd_to_go", "k3_loss", "reverse_exact"):
        assert (found["opd_immediate"] - found[other]).norm() > 0.1 * found["k2_loss"].norm()


def test_lessons_do_not_read_the_reward_and_guided_arms_do():
    preset = make_preset("distillation", {})
    assert preset.arms[0] == distillation.GRPO
    assert all(arm.advantage.baseline == "zero" for arm in preset.arms[1:])
    guided = [arm for arm in make_preset("kdrl", {}).arms if arm.name.startswith("kdrl")]
    assert len(guided) == 6
    assert all(arm.advantage.baseline == "group_normalise" for arm in guided)
    assert len({arm.distillation for arm in guided}) == 6


def test_a_weight_that_anneals_ends_at_nothing():
    arms = {arm.name: arm.distillation for arm in make_preset("kdrl", {"updates": 80}).arms}
    annealed = arms["kdrl_annealed"]
    assert (annealed.weight, annealed.weight_end, annealed.anneal_updates) == (0.3, 0.0, 40)
    assert arms["kdrl_masked"].only_below == 0.5 and arms["kdrl_masked"].weight_end is None
