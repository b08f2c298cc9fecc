"""The trainer on a device that is not the CPU, without such hardware: see ``far_device``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.agreement import presets, shortened

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]  # where tests can be imported from
PRESETS = presets()
TAUGHT = [name for name, one in PRESETS.items() if getattr(one.config, "teacher", None)]

MIXING = """
import torch
from tests.training.far_device import install

def refused(call):
    try:
        call()
    except (RuntimeError, TypeError) as error:
        return "far" in str(error)
    return False

with install():
    far, near = torch.ones(3, 4, device="far"), torch.ones(3, 4)
    places = torch.tensor([2, 0])
    assert refused(lambda: far + near) and refused(lambda: torch.cat([far, near]))
    assert refused(lambda: torch.where(far > 0, far, near))
    assert refused(lambda: far.gather(1, places.unsqueeze(1)))
    assert refused(lambda: near[torch.tensor([0], device="far")])
    assert refused(far.numpy)
    assert (far + torch.tensor(2.0)).device.type == far[places].device.type == "far"
    assert torch.equal((far * 3).cpu(), near * 3) and near.to("far").device.type == "far"
"""


@pytest.fixture(scope="module")
def runs() -> dict[str, dict]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.training.far_runs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["preset"]: row for row in rows}


@pytest.mark.parametrize(
    "preset", [n for n, p in PRESETS.items() if getattr(p.config, "teacher", 0)]
)
def test_a_teacher_is_not_the_start(preset):
    """Or distillation would train on rounding errors, and every comparison of it say nothing."""
    config = shortened(PRESETS[preset]).config
    assert config.teacher.start.updates > config.start.updates


def test_the_far_device_refuses_what_cuda_refuses():
    command = [sys.executable, "-c", MIXING]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("preset", [*PRESETS, "questions"])
def test_every_preset_trains_there_with_the_numbers_of_the_cpu(runs, preset):
    row = runs[preset]
    assert row["device"] == "far"
    assert row["moved"] > 1e-4, "nothing was trained"
    assert row["metrics"] < 1e-12 and row["weights"] < 1e-11


@pytest.mark.parametrize("preset", PRESETS)
def test_an_optimizer_step_waits_for_the_device_once(runs, preset):
    """To learn which runs failed: a device that is read from more often stands idle."""
    for waits in runs[preset]["waits"]:
        assert set(waits) <= {"aten._to_copy.default"}
        assert sum(waits.values()) == runs[preset]["steps"]


@pytest.mark.parametrize("preset", [*PRESETS, "questions"])
def test_graphs_spare_most_launches(runs, preset):
    """What is left are the task's scores, the optimizer, and what goes in and out."""
    assert runs[preset]["replayed"] < 0.3 * runs[preset]["operations"]


def test_more_runs_are_not_more_operations(runs):
    """On a GPU an update of a small model takes the time of its launches, however many runs."""
    few, many = runs["quick"], runs["more seeds"]
    assert many["runs"] == 3 * few["runs"]
    assert many["operations"] == few["operations"]
