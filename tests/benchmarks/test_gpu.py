"""``python -m benchmarks.gpu``: steps isolated, in time, and on disk; rehearsed on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pandas as pd
import pytest

from analysis.records import recording
from analysis.studies.language.start import Reading
from analysis.studies.presets import make_preset
from analysis.studies.presets.worked_sums import START_UPDATES
from benchmarks import gpu, gpu_steps
from benchmarks.gpu_steps import STEPS, Call
from benchmarks.processes import CHECKOUT
from tests.checkpoints import checkpoint_of_sums


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
    first = listed.index("sweep:smollm2_worked_sums:1of5")
    assert listed[first - 1] == "start" and "sweep:smollm2_reward_terms:2of2" in listed[:first]
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


def test_runs_on_worked_sums_begin_where_the_step_before_them_says(tmp_path, capfd):
    call = Call(device="cpu", directory=tmp_path)
    step = gpu.step_of("sweep:smollm2_worked_sums:1of5", call)
    echo = step._replace(command=[sys.executable, "-c", "import sys; print(sys.argv[1:])"])
    (line,) = gpu.run_steps([echo], 60.0, tmp_path)
    assert line["status"] == "failed" and "run the step start first" in line["said"]
    step.start.parent.mkdir()
    for accuracies, status, said in (
        ((0.1, 0.33, 0.47, 0.8, 0.9), "done", "['-o', 'start_updates=50']"),  # a tie: the shorter
        (
            (0.0, 0.05, 0.8, 0.9, 0.9),
            "failed",
            "no start has an accuracy of 0.15 to 0.75 (0.00 after 25",
        ),
        ((0.1, 0.2, 0.3), "failed", "read after 25, 50, 100 updates"),  # cut before the nearest
    ):
        table = pd.DataFrame({"updates": START_UPDATES[: len(accuracies)], "accuracy": accuracies})
        table.to_csv(step.start, index=False)
        (line,) = gpu.run_steps([echo], 60.0, tmp_path)
        log = (tmp_path / "logs" / "sweep_smollm2_worked_sums_1of5.txt").read_text()
        assert line["status"] == status and said in line.get("said", log)
    small = gpu.step_of("sweep:smollm2_worked_sums", call.model_copy(update={"small": True}))
    assert small.start is None and "start_updates=2" in small.command


def test_a_start_is_read_to_its_end_once(tmp_path, monkeypatch):
    """Parts of one sweep, in calls of several days, begin at one start."""
    said = pd.DataFrame({"updates": [1], "question": ["1 + 1 ="], "answer": [" 2"], "right": [1.0]})
    taken: list[int] = []

    def readings(config, after, text, device):
        for updates in after:
            taken.append(updates)
            yield Reading({"updates": updates, "accuracy": 0.4}, said)
            if stops:
                raise KeyboardInterrupt

    monkeypatch.setattr(gpu_steps.starts, "readings", readings)
    monkeypatch.setattr(gpu_steps.proxy_answers, "text_of", lambda config: None)
    call = Call(device="cpu", directory=tmp_path)
    hub = call.model_copy(update={"weights": "hub"})
    stops = True
    with pytest.raises(KeyboardInterrupt):
        gpu_steps.start(call)
    stops = False
    for again, read in ((call, START_UPDATES), (call, ()), (hub, START_UPDATES), (hub, ())):
        taken.clear()
        gpu_steps.start(again)
        assert tuple(taken) == read


@pytest.mark.peers
@pytest.mark.slow
def test_the_steps_on_worked_sums_rehearsed_on_an_untrained_model(tmp_path, monkeypatch):
    """What is asked of a GPU, from the start that is read to the runs that are recorded."""
    pytest.importorskip("reasoning_gym", reason="the extra lm is not installed")
    weights = checkpoint_of_sums(tmp_path / "model")
    options = ["--device", "cpu", "--small", "--directory", str(tmp_path / "gpu")]
    names = ["start", "sweep:smollm2_worked_sums", "sweep:smollm2_worked_sums_stale"]
    called = [*names, *options, "--weights", str(weights), "--minutes", "60"]
    for name in names:
        monkeypatch.setitem(gpu.STEPS, name, ("", 1200.0))  # beside other work on the machine
    assert gpu.main(called) == 0, summary(tmp_path / "gpu")
    table = pd.read_csv(tmp_path / "gpu" / "start_cpu" / "start.csv")
    assert list(table["updates"]) == [1, 2] and table["length"].between(1, 80).all()
    said = pd.read_csv(tmp_path / "gpu" / "start_cpu" / "answers.csv")
    assert said["question"].str.fullmatch(r"\d( [+-] \d){6} =").all()
    for name in names[1:]:
        recorded = recording.load(tmp_path / "gpu" / f"{name.partition(':')[2]}_cpu")
        assert len(recorded.finals) == 11 and not recorded.failures
        first = recorded.curves[recorded.curves["update"] == 0]
        assert len(first) == 11 and (first["reverse_kl"] == 0).all()
