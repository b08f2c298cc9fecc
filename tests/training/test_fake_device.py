"""Every preset on a device that is not the CPU, without such hardware: see ``fake_device``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.agreement import presets, shortened

ROOT = Path(__file__).parents[2]  # where tests can be imported from
PRESETS = presets()
TAUGHT = [name for name, one in PRESETS.items() if getattr(one.config, "teacher", None)]
#: Of an optimizer step: which runs failed. A device that is read from more often stands idle.
READS = 1
#: Prompts and noise; beyond them which rows stale and distilled runs take.
UPLOADS = 4


def said(*arguments: str) -> list[dict]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.training.fake_device", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    return {row["preset"]: row for row in said()}


@pytest.mark.slow
def test_the_watch_finds_what_cuda_would_not_record():
    (planted,) = said("planted")
    clean = [name for name, refused in planted.items() if not refused]
    assert clean == ["none of these"] and len(planted) > 10


@pytest.mark.slow
@pytest.mark.parametrize("preset", [*PRESETS, "reward head", "questions"])
def test_every_preset_can_be_recorded_and_spares_most_launches(rows, preset):
    """And no operation of an update mixes devices: that would have ended the program.

    What is still launched are the optimizer, the scores, and what goes in and out.
    """
    row = rows[preset]
    assert row["device"] == "fake" and row["refused"] == []
    assert row["launched"] < 0.1 * (row["launched"] + row["recorded"])
    if preset != "questions":  # they are scored on the CPU
        assert row["meetings"]["read"] == READS * row["steps"]
        assert row["meetings"]["upload"] <= UPLOADS


@pytest.mark.slow
def test_more_runs_are_not_more_launches(rows):
    """On a GPU an update of a small model takes the time of its launches, however many runs."""
    few, many = rows["quick"], rows["more seeds"]
    assert many["runs"] == 3 * few["runs"]
    assert many["launched"] == few["launched"] and many["recorded"] == few["recorded"]


@pytest.mark.parametrize("preset", TAUGHT)
def test_a_teacher_is_not_the_start(preset):
    """Or distillation would train on rounding errors, and every comparison of it say nothing."""
    config = shortened(PRESETS[preset]).config
    assert config.teacher.start.updates > config.start.updates
