"""A benchmark that is stopped loses no finished round."""

from __future__ import annotations

import contextlib
import os

import pandas as pd
import pytest
import torch

from analysis.cli.main import main
from analysis.errors import Refused, Stopped
from analysis.experiments.ablations.stamp import current_stamp
from analysis.experiments.benchmark import device as device_benchmark
from analysis.experiments.benchmark import measure
from analysis.experiments.benchmark.contenders import LARGEST, Turn
from analysis.experiments.benchmark.journal import STORE, Journal
from analysis.experiments.benchmark.measure import BenchmarkConfig
from analysis.experiments.language_models.presets import SMOKE


@pytest.fixture
def stamp():
    return current_stamp(LARGEST)


@pytest.fixture
def journal(tmp_path) -> Journal:
    return Journal(tmp_path / "benchmark", tmp_path / "unfinished")


def test_a_part_is_measured_once_until_the_end(tmp_path, stamp):
    calls = []

    def count():
        calls.append(1)
        return {"seconds": [len(calls)], "nothing": float("nan")}

    for _ in range(2):
        journal = Journal(tmp_path / "benchmark", tmp_path / "unfinished")
        journal.begin(stamp, "a")
        part = journal.part("round 1", count)
        assert part["seconds"] == [1] and part["nothing"] != part["nothing"]
        assert journal.holds("round 1") and not journal.holds("round 2")
    journal.end()
    assert not list((tmp_path / "unfinished").rglob("*.json"))
    journal.begin(stamp, "a")
    assert journal.part("round 1", count)["seconds"] == [2]


@pytest.mark.parametrize("changed", ["source", "device", "versions", "chosen"])
def test_parts_of_another_machine_source_or_choice_are_dropped(journal, stamp, changed):
    journal.begin(stamp, "a")
    journal.part("round 1", lambda: 1)
    other = stamp
    if changed != "chosen":
        new = {"torch": "another"} if changed == "versions" else "another"
        other = stamp.model_copy(update={changed: new})
    journal.begin(other, "b" if changed == "chosen" else "a")
    assert not journal.holds("round 1")
    journal.begin(stamp, "a")
    assert not journal.holds("round 1")


def test_benchmarks_of_one_name_do_not_share_their_parts(tmp_path, journal, stamp):
    journal.begin(stamp, "a")
    journal.part("round 1", lambda: 1)
    other = Journal(tmp_path / "elsewhere" / "benchmark", tmp_path / "unfinished")
    other.begin(stamp, "a")
    assert not other.holds("round 1") and journal.holds("round 1")


def test_a_journal_that_has_not_begun_or_cannot_be_written_says_so(tmp_path, journal, stamp):
    with pytest.raises(ValueError, match="call begin first"):
        journal.holds("round 1")
    (tmp_path / "unfinished").write_text("in the way")
    with pytest.raises(Refused, match="unfinished"):
        journal.begin(stamp, "a")


@pytest.fixture
def paced(monkeypatch):
    """Contenders whose n-th turn takes n seconds; the process is asked to end in the third."""
    state = {"turns": 0, "stop_at": 3, "started": 0}

    class Paced:
        def __init__(self, contender):
            self.contender = contender

        def turn(self):
            state["turns"] += 1
            if state["turns"] == state["stop_at"]:
                raise Stopped(15)
            rates = {"flops_per_second": 1e9, "bytes_per_second": 1e9}
            return Turn(float(state["turns"]), [rates] * self.contender.processes)

    @contextlib.contextmanager
    def crews(chosen):
        state["started"] += len(chosen)
        yield [Paced(contender) for contender in chosen]

    monkeypatch.setattr(measure, "crews", crews)
    monkeypatch.setattr(measure, "_phases", lambda width, members: [{"phase": "all", "share": 1.0}])
    return state


CONFIG = BenchmarkConfig(widths=(32,), members=(1,), rounds=3, with_trl=False, whole_machine=False)


def test_a_stopped_benchmark_goes_on_with_the_round_it_was_in(journal, paced):
    with pytest.raises(Stopped):
        measure.run(CONFIG, journal=journal)
    heard = []
    result = measure.run(CONFIG, heard.append, journal)
    assert heard == [
        "width 32 round 1 of 3 (kept)",
        "width 32 round 2 of 3",
        "width 32 round 3 of 3",
    ]
    # Turns 1 and 2 were the first round; the third was lost.
    assert result.rounds["seconds"].to_list() == [1.0, 2.0, 4.0, 5.0, 6.0, 7.0]
    assert result.rounds["round"].to_list() == [0, 0, 1, 1, 2, 2]
    assert result.phases["share"].to_list() == [1.0]


def test_more_rounds_are_added_to_those_that_are_there(journal, paced):
    paced["stop_at"] = 0
    measure.run(CONFIG, journal=journal)
    turns, started = paced["turns"], paced["started"]
    measure.run(CONFIG, journal=journal)
    assert (paced["turns"], paced["started"]) == (turns, started), "nothing was left to time"
    measure.run(CONFIG.model_copy(update={"rounds": 4}), journal=journal)
    assert paced["turns"] == turns + 2


def test_rounds_of_another_version_of_trl_are_not_mixed_in(journal, paced, monkeypatch):
    paced["stop_at"] = 0
    config = CONFIG.model_copy(update={"with_trl": True})
    for version in ("1.0", "2.0"):
        monkeypatch.setattr(measure, "trl_version", lambda version=version: version)
        turns = paced["turns"]
        assert measure.run(config, journal=journal).trl == version
        assert paced["turns"] == turns + 9, "three contenders, three rounds, all timed"


def test_the_command_goes_on_after_a_signal_and_cleans_up(tmp_path, paced, monkeypatch, capsys):
    monkeypatch.setattr("analysis.cli.bench.trl_version", lambda: None)
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "results" / "benchmark"
    command = ["bench", "--rounds", "2", "--widths", "32", "--directory", str(target)]
    paced["stop_at"] = 12
    assert main(command) == 128 + 15
    assert not target.parent.exists(), "the book reads results: nothing unfinished lies there"
    assert main(command) == 0
    assert "round 1 of 2 (kept)" in capsys.readouterr().err
    assert os.listdir(target.parent) == ["benchmark"] and not list(STORE.rglob("*.json"))
    machine = pd.read_csv(target / "machine.csv")
    assert machine["flops_per_second"].to_list() == [1e9, 2e9] * 2


def test_loads_of_a_device_are_kept_one_by_one(journal, monkeypatch):
    monkeypatch.setattr(device_benchmark, "machine_rates", lambda device: pd.DataFrame({"a": [1]}))
    loads = device_benchmark.tiny_loads(members=(1, 2), widths=(8,), updates=1)
    first = device_benchmark.run(loads, torch.device("cpu"), journal=journal)
    monkeypatch.setattr(device_benchmark, "_timed", lambda *_: pytest.fail("timed again"))
    again = device_benchmark.run(loads, torch.device("cpu"), journal=journal)
    for name in ("populations", "phases", "machine"):
        pd.testing.assert_frame_equal(getattr(first, name), getattr(again, name))


def test_the_source_of_a_device_benchmark_is_that_of_all_its_loads():
    tiny = device_benchmark.tiny_loads(members=(1,), widths=(8,), updates=1)
    text = device_benchmark.Load("adapters", SMOKE.config, 1, updates=1)
    sources = [
        device_benchmark.stamp_of(loads, torch.device("cpu")).source
        for loads in (tiny, [*tiny, text], [text, *tiny])
    ]
    assert sources[0] == current_stamp(tiny[0].config).source
    assert sources[1] == sources[2] == current_stamp(SMOKE.config).source != sources[0]


def test_two_processes_do_not_measure_for_one_directory(tmp_path, journal, stamp):
    journal.begin(stamp, "a")
    journal.part("round 1", lambda: 1)
    other = Journal(tmp_path / "benchmark", tmp_path / "unfinished")
    with pytest.raises(Refused, match="another process is measuring for it"):
        other.begin(stamp, "b")
    assert journal.holds("round 1"), "and nothing of the first is lost"
    journal.end()
    other.begin(stamp, "b")


@pytest.mark.parametrize("damage", [b"", b"[1, 2", b"\xff"])
def test_a_damaged_part_is_measured_again(tmp_path, journal, stamp, damage):
    journal.begin(stamp, "a")
    journal.part("round 1", lambda: [1])
    (file,) = (tmp_path / "unfinished").rglob("round_1.json")
    file.write_bytes(damage)
    assert not journal.holds("round 1")
    assert journal.part("round 1", lambda: [2]) == [2]
