"""Recorded functions, on the far device's recorder: what a replay may and may not do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from analysis.training.arms import Arm
from analysis.training.config import Member, TrainConfig
from analysis.training.graphs import WARM_UP, launcher
from analysis.training.trainer import PopulationTrainer

#: Programs for a process of their own: a process has one far device for good.
BEGIN = f"""
import torch
from analysis.training.graphs import Graphs
from tests.training.far_device import install
from tests.training.far_graphs import FarRecorder

WARM_UP = {WARM_UP}
device = install()
device.__enter__()

def far(*numbers):
    return torch.tensor(numbers).to("far")

def refused(call, *words):
    try:
        call()
    except RuntimeError as error:
        return all(word in str(error) for word in words)
    return False
"""

REPLAYS = """
calls = []
def double(x, nothing):
    calls.append(1)
    return 2 * x, (x + 1,)

graphs = Graphs(FarRecorder())
for n in range(6):
    twice, (more,) = graphs("double", double, far(float(n), 1.0), None)
    assert twice.tolist() == [2.0 * n, 2.0] and more.tolist() == [n + 1.0, 2.0]
assert len(calls) == WARM_UP + 1
# Another shape is another recording; results hold until the next call under the name.
for n in range(6):
    assert graphs("double", double, far(float(n)), None)[0].tolist() == [2.0 * n]
assert len(calls) == 2 * (WARM_UP + 1)
assert twice.tolist() == [10.0, 2.0]
graphs("double", double, far(7.0, 8.0), None)
assert twice.tolist() == [14.0, 16.0]
"""

STALE = """
# What is not an input stays as it was recorded: the reason why the trainer's tests replay.
state = {"scale": 0.0}
graphs = Graphs(FarRecorder())
for n in range(5):
    state["scale"] = float(n)
    found = graphs("scaled", lambda x: x * state["scale"], far(1.0)).item()
    assert found == min(n, WARM_UP), (n, found)
"""

PASSING = """
graphs = Graphs(FarRecorder())
for n in range(5):
    one = graphs("one", lambda x: x + 1, far(float(n)), passing=True)
    kept = graphs("kept", lambda x: x + 2, far(float(n)))
    assert one.item() == n + 1
    other = graphs("other", lambda x: x + 3, far(float(n)), passing=True)
    assert other.item() == n + 3 and kept.item() == n + 2
assert not one.item() == 5.0
"""

FIXED = """
weights = far(1.0, 2.0)
graphs = Graphs(FarRecorder(), fixed=[weights])
def step(weights, x):
    return (weights * x).sum().reshape(1), [x]
for n in range(5):
    total, kept = graphs("step", step, weights, far(1.0, 1.0))
    assert total.tolist() == [3.0 + 2 * n]
    doubled = graphs("read", lambda total, kept: 2 * kept[0], total, kept)
    weights.add_(1.0)
# Weights elsewhere, or a list that no recording made, are not what was recorded.
assert refused(lambda: graphs("step", step, weights.clone(), far(1.0, 1.0)), "'step'", "input")
assert refused(lambda: graphs("read", None, total, [1]), "'read'", "input")
"""

REFUSED = """
def recorded(function):
    graphs = Graphs(FarRecorder())
    for _ in range(WARM_UP + 1):
        graphs("it", function, far(1.0, 2.0))

near = torch.tensor([1.0, 2.0])
assert refused(lambda: recorded(lambda x: x * x.sum().item()), "meet")
assert refused(lambda: recorded(lambda x: x.cpu()), "meet")
assert refused(lambda: recorded(lambda x: x + near.to("far")), "meet")
assert refused(lambda: recorded(lambda x: x[x > 1.0]), "meet")
recorded(lambda x: torch.where(x > 1.0, x, 0.0))
"""


@pytest.mark.parametrize(
    "program",
    [REPLAYS, STALE, PASSING, FIXED, REFUSED],
    ids=["replays", "stale", "passing", "fixed", "refused"],
)
def test_recordings(program):
    command = [sys.executable, "-W", "ignore", "-c", BEGIN + program]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_graphs_a_function_is_called():
    calls = []
    launch = launcher(torch.device("cpu"), graphs=False)
    assert [launch("name", lambda x: calls.append(x) or x, n) for n in range(4)] == calls


def test_graphs_on_a_device_without_them_are_refused(small_config: TrainConfig):
    member = Member(arm=Arm(), seed=0)
    with pytest.raises(ValueError, match="graphs are for cuda: on cpu leave them off"):
        PopulationTrainer(small_config, [member], graphs=True)
