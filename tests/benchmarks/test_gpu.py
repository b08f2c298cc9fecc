"""``python -m benchmarks.gpu``: steps isolated, in time, and on disk; rehearsed on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pandas as pd
import pytest

from analysis.studies.presets import make_preset
from benchmarks import gpu
from benchmarks.gpu_steps import STEPS, Call
from benchmarks.processes import CHECKOUT


def summary(directory):
    return [json.loads(line) for line in (directory / "summary.jsonl").read_text().splitlines()]


def python(name, code, seconds=30.0):
    return gpu.Step(name, seconds, [sys.executable, "-c", code])


@pytest.mark.slow
def test_a_step_that_fails_or_hangs_costs_no_other(tmp_path, capfd):
    mark = tmp_path / "mark"
    late = f"import time; time.sleep(4); open({str(mark)!r}, 'w')"
    hanging = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {late!r}]); time.sleep(60)"
    )
    began = time.monotonic()
    steps = [
        python("failing", "raise SystemExit('no such model')"),
        python("hanging", hanging, seconds=2),
        python("sound", f"print(open({str(tmp_path / 'summary.jsonl')!r}).read())"),
    ]
    lines = gpu.run_steps(steps, 60.0, tmp_path)
    assert lines == summary(tmp_path)
    assert [line["status"] for line in lines] == ["failed", "cut", "done"]
    assert lines[0]["said"] == "no such model" and 2 <= lines[1]["seconds"] < 4
    seen = (tmp_path / "logs" / "sound.txt").read_text()
    assert '"hanging", "status": "cut"' in seen, "the summary was not on disk when the next began"
    time.sleep(max(0.0, 6 - (time.monotonic() - began)))
    assert not mark.exists(), "a child of the step that was cut lived on"


def test_without_time_a_step_is_not_begun_and_that_is_said(tmp_path, capfd):
    mark = tmp_path / "mark"
    (line,) = gpu.run_steps([python("late", f"open({str(mark)!r}, 'w')")], 5.0, tmp_path)
    assert line == summary(tmp_path)[0] == {"step": "late", "status": "not begun", "seconds": 0.0}
    assert not mark.exists() and "late: not begun" in capfd.readouterr().out


@pytest.mark.slow
def test_the_command_rehearsed(tmp_path, monkeypatch):
    """A step that runs, one that fails, one that is cut, and what is on disk in the end."""
    monkeypatch.setenv("KL_TERM_TRL_PYTHON", str(tmp_path / "no_python"))
    monkeypatch.setitem(gpu.STEPS, "agreement", ("", 0.5))
    for name in ("vocabulary", "adapters", "repeat"):
        monkeypatch.setitem(gpu.STEPS, name, ("", 300.0))  # beside other work on the machine
    options = ["--device", "cpu", "--small", "--directory", str(tmp_path)]
    names = ["vocabulary", "trl", "agreement", "adapters", "repeat"]
    assert gpu.main([*names, *options, "--minutes", "30", "--presets", "clip_higher"]) == 1
    lines = summary(tmp_path)
    ended = ["done", "failed", "cut", "done", "done", "done"]
    assert [line["status"] for line in lines] == ended, lines
    kernels = pd.read_csv(tmp_path / "kernels_cpu" / "kernels.csv")
    assert (kernels[["kernels", "ms", "gradient_ms", "gradient_flops"]] > 0).all(axis=None)
    both = pd.read_csv(tmp_path / "repeat_cpu" / "repeat.csv")
    assert len(both) == 2 and both[["accuracy", "accuracy_again"]].notna().all(axis=None)
    assert "KL_TERM_TRL_PYTHON" in lines[1]["said"]
    methods = pd.read_csv(tmp_path / "full_vocabulary_cpu" / "benchmark.csv")["method"]
    assert list(methods) == ["sampled", "naive", "chunked"]
    assert (tmp_path / "clip_higher_cpu" / "manifest.json").exists()


@pytest.mark.slow
def test_presets_agree_with_themselves(tmp_path):
    call = Call(device="cpu", directory=tmp_path, small=True).model_dump_json()
    command = ["-m", "benchmarks.gpu_steps", "agreement", call]
    subprocess.run([sys.executable, *command], check=True, cwd=CHECKOUT)
    table = pd.read_csv(tmp_path / "agreement_cpu" / "agreement.csv")
    assert len(table) == 2 and (table["moved"] > 1e-4).all()
    assert (table[["metrics", "weights"]] == 0).all(axis=None)


def test_steps_are_commands_that_exist(tmp_path, capsys):
    assert gpu.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(gpu.STEPS)
    call = Call(device="cuda", directory=tmp_path, weights="packaged")
    for name in listed:
        command = gpu.step_of(name, call).command
        assert command[3] in (*STEPS, "sweep")
    swept = gpu.step_of("sweep:smollm2", call).command
    assert "--graphs" not in swept and swept[-4:] == ["--workers", "2", "-o", "weights=packaged"]
    assert gpu.step_of("sweep:quick", call).command[-1] == "--graphs"
    long = gpu.step_of("sweep:smollm2_reward_long", call).command
    assert long[-6:-2] == ["--workers", "2", "--runs-per-shard", "10"]
    assert listed[:2] == ["sweep:smollm2_proxy", "sweep:smollm2_reward_long"]
    assert gpu.main(["sweep:unheard_of"]) == gpu.main(["speed"]) == 1
    assert "'speed': no such step; --list shows them" in capsys.readouterr().err


def test_a_part_of_a_sweep_has_its_share_of_the_seeds_and_a_folder_of_its_own(tmp_path, capsys):
    call = Call(device="cuda", directory=tmp_path)
    seeds = make_preset("smollm2_reward_terms", {}).seeds
    found = []
    for part in ("1of2", "2of2"):
        command = gpu.step_of(f"sweep:smollm2_reward_terms:{part}", call).command
        given = dict(word.split("=") for word in command if "=" in word)
        first = int(given["first_seed"])
        found += range(first, first + int(given["num_seeds"]))
        assert command[command.index("--record") + 1].endswith(f"smollm2_reward_terms_{part}_cuda")
    assert found == list(seeds)
    whole = gpu.step_of("sweep:smollm2_reward_terms", call).command
    assert not [word for word in whole if "seed" in word], "what parts stored is recorded as one"
    for part in ("0of2", "3of2", "1of3", "1of0", "half", "1of2of3"):
        assert gpu.main([f"sweep:smollm2_reward_terms:{part}"]) == 1
        said = f":{part}: a part reads 1of2, and 10 seeds have no such one"
        assert said in capsys.readouterr().err
