"""Recorded functions, on the far device's recorder: what a replay may and may not do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from analysis.training.config import Run, TrainConfig
from analysis.training.graphs import WARM_UP, CudaRecorder, launcher
from analysis.training.trainer import PopulationTrainer
from analysis.training.variants import Variant

pytestmark = pytest.mark.slow

#: Programs for a process of their own: a process has one far device for good.
BEGIN = f"""
import logging

import torch
from analysis.training.graphs import Graphs
from tests.training.far_device import install
from tests.training.far_graphs import FarRecorder

WARM_UP = {WARM_UP}
device = install()
device.__enter__()

def far(*numbers):
    return torch.tensor(numbers).to("far")

class Log(logging.Handler):
    said = []

    def emit(self, record):
        self.said.append(record.getMessage() + str(record.exc_info[1]))

logging.getLogger("analysis.training.graphs").addHandler(Log())

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

PARTS = """
# Minibatches of one run are parts of a result, in its memory: no copy makes them contiguous.
graphs = Graphs(FarRecorder())
for n in range(5):
    whole = graphs("whole", lambda x: x + 1, far([[float(n), 1.0, 2.0, 3.0]]))
    for first in (0, 2):
        part = whole[:, first : first + 2].contiguous()
        doubled = graphs("part", lambda x: 2 * x, part, passing=True)
        assert doubled.tolist() == (2 * part).tolist()
assert not Log.said
"""

REFUSED = """
# What CUDA cannot record is reported with its first error, and computed all the same.
near, number = torch.tensor([1.0, 2.0]), torch.tensor(2.0)
for function in (
    lambda x: x * x.sum().item(),
    lambda x: x.cpu(),
    lambda x: x + near.to("far"),
    lambda x: x + number.to("far"),
    lambda x: x[x > 1.0],
):
    graphs, before = Graphs(FarRecorder()), len(Log.said)
    for n in range(WARM_UP + 3):
        assert graphs("it", function, far(n, 2.0)).tolist() == function(far(n, 2.0)).tolist()
    assert len(Log.said) == before + 1
    assert "'it'" in Log.said[-1] and "meet" in Log.said[-1]
graphs = Graphs(FarRecorder())
for n in range(WARM_UP + 3):
    graphs("it", lambda x: torch.where(x > 1.0, x, 0.0), far(1.0, 2.0))
assert len(Log.said) == before + 1
"""


@pytest.mark.parametrize(
    "program",
    [REPLAYS, STALE, PASSING, FIXED, PARTS, REFUSED],
    ids=["replays", "stale", "passing", "fixed", "parts", "refused"],
)
def test_recordings(program):
    command = [sys.executable, "-W", "ignore", "-c", BEGIN + program]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]


class BrokenCapture:
    """As ``torch.cuda.graph``: ending a capture that failed raises an error of its own."""

    def __init__(self, *_, **__) -> None: ...

    def __enter__(self) -> None:
        torch.cuda.current_stream.place = "capture"

    def __exit__(self, *_) -> None:
        raise RuntimeError("capture was invalidated")


def test_the_first_error_of_a_capture_is_shown_and_its_stream_left(monkeypatch):
    class Stream:
        place = "usual"

        def __call__(self) -> str:
            return self.place

    stream = Stream()
    for name, value in {
        "graph_pool_handle": lambda: None,
        "CUDAGraph": lambda: SimpleNamespace(replay=None),
        "graph": BrokenCapture,
        "current_stream": stream,
        "set_stream": lambda place: setattr(stream, "place", place),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with pytest.raises(ZeroDivisionError):
        CudaRecorder().record(lambda: 1 / 0, passing=False)
    assert stream() == "usual"
    with pytest.raises(RuntimeError, match="invalidated"):
        CudaRecorder().record(lambda: 1, passing=True)


def test_without_graphs_a_function_is_called():
    calls = []
    launch = launcher(torch.device("cpu"), graphs=False)
    assert [launch("name", lambda x: calls.append(x) or x, n) for n in range(4)] == calls


def test_graphs_on_a_device_without_them_are_refused(small_config: TrainConfig):
    run = Run(variant=Variant(), seed=0)
    with pytest.raises(ValueError, match="graphs are for cuda: on cpu leave them off"):
        PopulationTrainer(small_config, [run], graphs=True)
