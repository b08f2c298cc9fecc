"""``python -m benchmarks``: processes that take turns, devices, options, and what is recorded."""

from __future__ import annotations

import sys
import time

import pandas as pd
import pytest
import torch

from analysis.chapters import ch12_performance as chapter
from analysis.training.counting import generated_tokens
from benchmarks import __main__ as command
from benchmarks import device as device_benchmark
from benchmarks import measure, processes
from benchmarks.processes import Case, Workers
from benchmarks.worker import phase_shares, population


def test_every_phase_of_an_update_is_timed():
    trainer = population(Case(kind="population", width=32, runs=2))
    while trainer.done % trainer.config.log_every:
        trainer.advance()
    shares = phase_shares(trainer, 2)  # the first of them measures the policy
    assert set(shares) == {
        *("rollout", "reference", "forward", "backward", "optimizer", "metrics", "other")
    }
    # A function that is renamed would leave its phase at zero and its time in "other".
    assert all(share > 0 for share in shares.values())
    assert shares["other"] < 0.5


@pytest.mark.slow
def test_workers_train_when_told_to():
    workers = Workers(Case(kind="population", width=32, runs=2, processes=2, updates=1))
    try:
        workers.wait_until_ready()
        turn = workers.turn()
    finally:
        workers.end()
    assert len(turn.answers) == 2
    assert turn.seconds * 4 >= max(said["seconds"] for said in turn.answers)


@pytest.fixture
def said(monkeypatch):
    """Let every process of a workers be this Python code instead."""

    def be(code: str) -> Workers:
        monkeypatch.setattr(processes, "command", lambda case: [sys.executable, "-c", code])
        return Workers(Case(kind="plain", width=32))

    return be


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('no such model')", "plain ended: no such model"),
        ("pass", "plain ended: it wrote nothing"),
        ("print('hello')", "plain should be ready and writes 'hello'"),
    ],
)
def test_a_process_that_does_not_start_says_why(said, code, message):
    workers = said(code)
    try:
        with pytest.raises(ValueError, match=f"^{message}$"):
            workers.wait_until_ready()
    finally:
        workers.end()


@pytest.mark.parametrize("when", ["input()", "pass"])
def test_a_process_that_ends_in_its_turn_says_why(said, when):
    workers = said(f"print('ready', flush=True); {when}; raise SystemExit('out of memory')")
    try:
        workers.wait_until_ready()
        time.sleep(0.0 if when == "input()" else 0.2)
        with pytest.raises(ValueError, match=r"^plain ended: out of memory$"):
            workers.turn()
    finally:
        workers.end()


def test_a_talkative_process_is_not_held_up(said):
    workers = said(
        "import sys; print('ready', flush=True); input()\n"
        "sys.stderr.write('a warning\\n' * 100_000); print('{\"seconds\": 1}', flush=True)"
    )
    try:
        workers.wait_until_ready()
        assert workers.turn().answers == [{"seconds": 1}]
    finally:
        workers.end()


def test_a_python_without_trl_is_left_out_and_one_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(processes.sys, "executable", str(tmp_path / "no_trl"))
    (tmp_path / "no_trl").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "no_trl").chmod(0o755)
    assert processes.trl_version() is None
    monkeypatch.setenv(processes.TRL_PYTHON, str(tmp_path / "python"))
    with pytest.raises(ValueError, match=r"KL_TERM_TRL_PYTHON=.* does not run"):
        processes.trl_version()


@pytest.mark.slow
def test_a_round_is_recorded_and_read_back(tmp_path, monkeypatch, capsys):
    """Two small trainers, two rounds, and the machine: the whole command."""
    monkeypatch.setattr(command, "trl_version", lambda: None)
    monkeypatch.setattr(measure, "RUNS", (2,))
    chosen = [
        *(Case(kind="population", width=32, runs=n) for n in (2, 24)),
        Case(kind="population", width=32, runs=12, processes=2),
        *(Case(kind="machine", width=32, processes=n) for n in (1, 2)),
    ]
    monkeypatch.setattr(measure, "cases", lambda *_, **__: chosen)
    folder = tmp_path / "benchmark"
    assert command.main(["--rounds", "2", "--widths", "32", "--directory", str(folder)]) == 0
    back = chapter.load(folder)
    assert back.rounds["trainer"].tolist() == [c.name for c in chosen[:3]] * 2
    assert (back.rounds["seconds"] > 0).all() and len(back.machine) == 4
    assert back.manifest["preset"] == "benchmark" and "trl" not in back.manifest["versions"]
    assert back.manifest["configuration"]["rounds"] == 2 and back.manifest["source"]
    assert (chapter.floors(back)["ratio"] > 1).all()
    assert "TRL not found" in capsys.readouterr().out
    (folder / "rounds.csv").write_text("changed")
    with pytest.raises(ValueError, match="changed since it was recorded"):
        chapter.load(folder)


def test_a_device_is_timed_phase_by_phase(monkeypatch):
    monkeypatch.setattr(device_benchmark, "machine_rates", lambda device: pd.DataFrame({"a": [1]}))
    loads = device_benchmark.tiny_loads(runs=(2,), widths=(8,), updates=2)
    result = device_benchmark.run(loads, torch.device("cpu"))
    (row,) = result.populations.to_dict("records")
    assert row["ms"] > 0 and row["runs"] == 2
    config = loads[0].config
    assert row["tokens"] == pytest.approx(1e3 * generated_tokens(config) / row["ms"])
    phases = result.phases.set_index("phase")["ms"]
    assert list(phases.index) == ["rollout", "reference", "forward", "backward", "optimizer"]
    assert (phases > 0).all()


def test_a_population_that_does_not_fit_is_left_out(monkeypatch):
    def full(load, *_, **__):
        if load.runs > 2:
            raise torch.OutOfMemoryError
        return {"runs": load.runs}

    monkeypatch.setattr(device_benchmark, "_row", full)
    monkeypatch.setattr(device_benchmark, "machine_rates", lambda device: None)
    said = []
    loads = device_benchmark.tiny_loads(runs=(2, 3), widths=(8,))
    result = device_benchmark.run(loads, torch.device("cpu"), said.append)
    assert list(result.populations["runs"]) == [2]
    assert said[-1] == "tiny, width 8, 3 runs: left out, OutOfMemoryError"


def test_rates_of_a_device_are_those_of_its_products():
    table = device_benchmark.machine_rates(torch.device("cpu"), size=128, copied=2**22)
    assert list(table["precision"]) == ["float32", "bfloat16"]
    assert (table["seconds_per_launch"].between(1e-8, 1e-2)).all()
    assert (table["flops_per_second"] > 1e8).all() and (table["bytes_per_second"] > 1e8).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weights", "hub"], "--weights are of --language-model"),
        (["--widths", "32", "--language-model"], "--widths are of the tiny policy"),
        (["--rounds", "3", "--device", "cuda"], "on a GPU only --language-model takes turns"),
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--widths", "32", "32"], "--widths: a width is given twice: [32, 32]"),
        (["--widths", "33"], "--widths: width 33: Input should be a multiple of 4"),
        (["--widths", "0"], "--widths: width 0: Input should be greater than or equal to 4"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(options, message, capsys):
    assert command.main(options) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], [("cpu", "benchmark_cpu", (32, 64), 15)]),
        (["--widths", "32", "--rounds", "2"], [("cpu", "benchmark_cpu", (32,), 2)]),
        (["--language-model"], [("text", "benchmark_smollm2_cpu", "cpu", None)]),
        (["--device", "cuda"], [("cuda", "benchmark_cuda", (32, 64), False)]),
        (
            ["--device", "cuda", "--language-model"],
            [
                ("cuda", "benchmark_cuda", (32, 64), True),
                ("text", "benchmark_smollm2_cuda", "cuda", None),
            ],
        ),
        (
            ["--device", "cuda", "--language-model", "--directory", "a/b", "--rounds", "7"],
            [("cuda", "b", (32, 64), True), ("text", "b_smollm2", "cuda", 7)],
        ),
    ],
)
def test_options_reach_what_is_timed(options, expected, monkeypatch):
    found = []

    def of_device(widths, folder, config):
        found.append(("cuda", folder.name, widths, config is not None))

    def of_text(config, device, rounds, folder):
        assert config.cosine_every == 0
        found.append(("text", folder.name, device, rounds))

    monkeypatch.setattr(command, "bench_device", of_device)
    monkeypatch.setattr(command, "bench_language", of_text)
    monkeypatch.setattr(
        command, "bench_cpu", lambda w, rounds, f: found.append(("cpu", f.name, w, rounds))
    )
    assert command.main(options) == 0
    assert found == expected


def test_a_language_model_needs_its_packages(capsys, monkeypatch):
    def missing(module, extra):
        raise ValueError(f"{module} is not installed: pip install -e '.[{extra}]'")

    monkeypatch.setattr(command, "needed", missing)
    assert command.main(["--language-model"]) == 1
    assert "transformers is not installed: pip install -e '.[lm]'" in capsys.readouterr().err


@pytest.mark.slow
def test_what_compiling_costs_is_measured():
    from benchmarks.compiled import ratios

    tracing, running = ratios("eager", rounds=3)
    assert tracing > 1  # the guard is traced too
    assert 0 < running < 10
