"""Recorded functions: what a replay may and may not do, and every preset replayed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from analysis.records.config import Run, TrainConfig
from analysis.records.variants import Variant
from analysis.training import graphs as training_graphs
from analysis.training.graphs import WARM_UP, CudaRecorder, Graphs, launcher
from analysis.training.trainer import PopulationTrainer
from benchmarks.agreement import differences
from tests.training.short_presets import UPDATES, short_presets
from tests.training.tape import Tape


def test_a_replay_computes_anew_without_the_program():
    calls = []

    def double(x, nothing):
        calls.append(1)
        return 2 * x, (x + 1,)

    graphs = Graphs(Tape())
    for n in range(6):
        twice, (more,) = graphs("double", double, torch.tensor([n, 1.0]), None)
        assert twice.tolist() == [2.0 * n, 2.0] and more.tolist() == [n + 1.0, 2.0]
    assert len(calls) == WARM_UP + 1
    # Another shape is another recording; results hold until the next call under the name.
    for n in range(6):
        assert graphs("double", double, torch.tensor([float(n)]), None)[0].tolist() == [2.0 * n]
    assert len(calls) == 2 * (WARM_UP + 1)
    assert twice.tolist() == [10.0, 2.0]
    graphs("double", double, torch.tensor([7.0, 8.0]), None)
    assert twice.tolist() == [14.0, 16.0]


def test_what_is_no_input_stays_as_it_was_recorded():
    """The reason why every preset is replayed below."""
    state = {"scale": 0.0}
    graphs = Graphs(Tape())
    for n in range(5):
        state["scale"] = float(n)
        found = graphs("scaled", lambda x: x * state["scale"], torch.tensor(1.0)).item()
        assert found == min(n, WARM_UP)


def test_passing_results_last_until_any_other_call():
    graphs = Graphs(Tape())
    for n in range(5):
        x = torch.tensor(float(n))
        one = graphs("one", lambda x: x + 1, x, passing=True)
        kept = graphs("kept", lambda x: x + 2, x)
        assert one.item() == n + 1
        other = graphs("other", lambda x: x + 3, x, passing=True)
        assert other.item() == n + 3 and kept.item() == n + 2
    assert one.isnan()


def test_fixed_inputs_are_read_where_they_are():
    weights = torch.tensor([1.0, 2.0])
    graphs = Graphs(Tape(), fixed=[weights])

    def step(weights, x):
        return (weights * x).sum().reshape(1), [x]

    for n in range(5):
        total, kept = graphs("step", step, weights, torch.ones(2))
        assert total.tolist() == [3.0 + 2 * n]
        graphs("read", lambda total, kept: 2 * kept[0], total, kept)
        weights.add_(1.0)
    # Weights elsewhere, or a list that no recording made, are not what was recorded.
    for name, inputs in {"step": (weights.clone(), torch.ones(2)), "read": (total, [1])}.items():
        with pytest.raises(RuntimeError, match=f"'{name}': an input is not the one recorded"):
            graphs(name, step, *inputs)


def test_parts_of_a_result_are_inputs():
    """Minibatches of one run are in its memory: no copy makes them contiguous."""
    graphs = Graphs(Tape())
    for n in range(5):
        whole = graphs("whole", lambda x: x + 1, torch.tensor([[float(n), 1.0, 2.0, 3.0]]))
        for first in (0, 2):
            part = whole[:, first : first + 2].contiguous()
            doubled = graphs("part", lambda x: 2 * x, part, passing=True)
            assert doubled.tolist() == (2 * part).tolist()


def test_what_cannot_be_recorded_is_reported_and_computed(caplog):
    class Refusing(Tape):
        def record(self, function, *, passing):
            raise RuntimeError("device and CPU meet")

    graphs = Graphs(Refusing())
    for n in range(WARM_UP + 3):
        assert graphs("it", lambda x: 2 * x, torch.tensor(float(n))).item() == 2 * n
    assert caplog.text.count("Traceback") == 1
    assert "'it'" in caplog.text and "device and CPU meet" in caplog.text


SHORT = {name: (preset, make) for name, preset, make in short_presets()}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_every_preset_replays_to_the_bit(name, monkeypatch, caplog):
    """Numbers that the program changes and no input brings would stay as they were recorded."""
    preset, make = SHORT[name]
    monkeypatch.setitem(training_graphs.RECORDERS, "cpu", Tape)
    monkeypatch.setattr(training_graphs, "WARM_UP", 0)
    direct = PopulationTrainer(preset.config, preset.runs, make("cpu"))
    start = direct.weights.detach().clone()
    direct.run()
    replayed = PopulationTrainer(preset.config, preset.runs, make("cpu"), graphs=True)
    replayed.run()
    assert replayed.done == UPDATES and not caplog.text
    found = differences(start, direct, replayed)
    assert found["moved"] > 1e-4, "nothing was trained"
    assert found["metrics"] == found["weights"] == 0.0


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
