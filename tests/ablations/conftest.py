"""A population with a teacher that every test here can afford."""

from __future__ import annotations

import pytest

from analysis.experiments.ablations.catalogue import make_preset
from analysis.experiments.ablations.presets import Preset
from analysis.training.config import StartConfig, TeacherConfig
from analysis.training.tasks import SortTask


@pytest.fixture
def two_digits() -> Preset:
    """The preset ``distillation`` on two digits, so that a few updates teach something."""
    wanted = make_preset("distillation", {"num_seeds": 2, "updates": 4})
    config = wanted.config.model_copy(
        update={
            "task": SortTask(num_digits=2, end_token=True, max_fillers=2),
            "start": StartConfig(updates=30, fillers=(2, 2)),
            "teacher": TeacherConfig(start=StartConfig(updates=300, fillers=(0, 0))),
        }
    )
    return wanted.model_copy(update={"config": config})
