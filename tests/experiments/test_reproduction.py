"""``analysis reproduce``: recorded runs trained again, their digits compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch

import analysis
import kl_term
from analysis.cli.main import main
from analysis.records import recording
from analysis.records.manifests import read_manifest, read_table
from analysis.records.preset import Preset
from analysis.records.recording import Recording
from analysis.studies.presets.designed import equal_kl
from analysis.studies.presets.language import smollm2_short
from analysis.sweeps import in_process, reproduction
from analysis.sweeps.reproduction import chosen, meaning, mismatches
from analysis.training.pretrained.folders import Unavailable
from analysis.training.trainer import PopulationTrainer
from kl_term.files import sealed, sha256_file
from tests.experiments.tiny import make_tiny
from tests.trees import on_one_thread

_TINY = make_tiny(6, betas=(0.1, 0.5), name="small")
_SIZES = {"log_every": 2, "num_prompts": 3, "group_size": 5}
SMALL = _TINY.model_copy(
    update={"config": _TINY.config.model_copy(update=_SIZES), "seeds": (0, 1, 2)}
)


@pytest.fixture(scope="module")
def small_ablation() -> Recording:
    with on_one_thread():
        return in_process.run(SMALL)


@pytest.fixture
def recorded(small_ablation: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a recording, in a folder of results of its own."""
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    recording.save(small_ablation, tmp_path / "small_cpu")
    return tmp_path / "small_cpu"


def change(path: Path, edit: Callable[[dict], dict]) -> None:
    """Edit a manifest and seal it anew."""
    path.write_bytes(sealed(edit(json.loads(path.read_bytes()))))


def change_a_digit(folder: Path, column: str, *, line: int) -> None:
    """Add one to the last digit of a field of ``curves.csv``, and hash the file again."""
    path = folder / "curves.csv"
    lines = [text.split(",") for text in path.read_text().splitlines()]
    place = lines[0].index(column)
    digits = lines[line][place]
    lines[line][place] = digits[:-1] + str((int(digits[-1]) + 1) % 10)
    path.write_text("\n".join(",".join(fields) for fields in lines) + "\n")
    files = {name: sha256_file(folder / name) for name in ("curves.csv", "final.csv")}
    change(folder / "manifest.json", lambda manifest: manifest | {"files": files})


def train_differently(monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """Weights a little larger once so many updates are done."""

    class Doctored(PopulationTrainer):
        def advance(self) -> None:
            super().advance()
            if self.done == after:
                with torch.no_grad():
                    self.weights.mul_(1.1)

    monkeypatch.setattr(in_process, "PopulationTrainer", Doctored)


def test_all_recordings_are_found_whatever_they_are_called(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "another_name")
    manifest = tmp_path / "another_name" / "manifest.json"
    change(manifest, lambda fields: fields | {"folder": "another_name"})
    (tmp_path / "no_recording").mkdir()
    assert reproduction.find() == [tmp_path / "another_name", recorded]
    (recorded / "curves.csv").unlink()  # it is still one, and damaged
    assert recorded in reproduction.find()


def test_a_recording_agrees_to_every_digit(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (recorded / "manifest.json").read_bytes()
    assert main(["reproduce"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("small_cpu: 4 of 4 runs agree to every digit of 6 updates (")
    assert said.count("\n") == 1
    assert main(["reproduce", str(recorded), "--runs", "12"]) == 0
    assert "12 of 12 runs agree" in capsys.readouterr().out
    assert (recorded / "manifest.json").read_bytes() == before


def test_that_runs_came_out_again_is_noted_in_the_manifest(recorded: Path, capsys) -> None:
    assert main(["reproduce", str(recorded), "--runs", "3", "--note"]) == 0
    noted = read_manifest(recorded)["reproduced"]
    assert noted["runs"] == 3 and noted["source"] == read_manifest(recorded)["source"]
    assert main(["reproduce", str(recorded), "--updates", "2", "--note"]) == 1
    assert "--note is of whole runs" in capsys.readouterr().err


def test_what_does_not_come_out_again_is_not_noted(recorded: Path, capsys) -> None:
    found = recording.load(recorded)
    changed = found.curves.assign(reward=found.curves["reward"] + 1.0)
    recording.save(found._replace(curves=changed), recorded)
    assert main(["reproduce", str(recorded), "--note"]) == 1
    assert "reproduced" not in read_manifest(recorded)


def test_every_number_of_the_chosen_runs_is_compared(recorded: Path) -> None:
    found = reproduction.reproduce(recorded)
    table = recording.load(recorded).curves
    keys = {(m.variant.name, m.variant.beta, m.seed) for m in found.runs}
    of_chosen = [
        key in keys for key in zip(table["variant"], table["beta"], table["seed"], strict=True)
    ]
    assert sum(of_chosen) == 3 * 4  # windows x runs
    curves = table[of_chosen]
    both = recording.compared(curves.assign(entropy=curves["entropy"] + 1), curves)
    assert set(mismatches(both)["metric"]) == {"entropy"} and len(mismatches(both)) == 12
    missing = mismatches(recording.compared(curves[curves["update"] != 4], curves))
    assert set(missing["update"]) == {4} and (missing["size"] == float("inf")).all()


def test_one_changed_digit_is_found_and_named(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_a_digit(recorded, "entropy", line=1 + 2)  # no KL term, seed 0, third window
    assert main(["reproduce", "small_cpu"]) == 1
    said = capsys.readouterr()
    assert "small_cpu: 3 of 4 runs agree to every digit" in said.out
    named = "none beta=0 seed=0 differs in its last digits in the window from update 4 on: entropy"
    assert named in said.out
    assert said.err.count("\n") == 1


def test_a_digit_of_a_run_that_is_not_trained_again_is_not_seen(recorded: Path) -> None:
    change_a_digit(recorded, "entropy", line=1 + 3)  # seed 1 of the first variant
    assert reproduction.reproduce(recorded).agrees
    assert not reproduction.reproduce(recorded, runs=12).agrees


HERE = "was recorded on such a machine with these versions"
ELSEWHERE = "small_cpu was recorded elsewhere (cpu, other, numpy"


@pytest.mark.parametrize(
    ("differs", "elsewhere", "update", "said", "unsaid"),
    [
        ("training", False, 2, [HERE, "most likely the code here computes something else"], ()),
        (
            "training",
            True,
            2,
            [ELSEWHERE, "flips a sampled token the runs part"],
            ["something else"],
        ),
        ("start", True, 0, ["already at update 0, by more than rounding"], [ELSEWHERE]),
    ],
    ids=["training", "training-elsewhere", "start-elsewhere"],
)
def test_what_parts_and_from_where_says_what_it_means(
    recorded: Path, monkeypatch, capsys, differs, elsewhere, update, said, unsaid
) -> None:
    """On another machine a later mismatch is no accusation; another start is one anywhere."""
    if elsewhere:
        change(recorded / "manifest.json", lambda manifest: manifest | {"device": "cpu, other"})
    if differs == "training":
        train_differently(monkeypatch, after=2)
    else:
        made = reproduction.environment_of
        moved = lambda config: (e := made(config))._replace(start=1.5 * e.start)
        monkeypatch.setattr(reproduction, "environment_of", moved)
    assert main(["reproduce"]) == 1
    shown = capsys.readouterr()
    assert "0 of 4 runs agree" in shown.out
    assert f"is the first to part, in the window from update {update} on: " in shown.out
    assert all(words in shown.err for words in said)
    assert not any(words in shown.err for words in unsaid)


@pytest.mark.parametrize(
    ("metric", "recorded", "again", "here", "accused"),
    [
        ("entropy", 1.0, 1.03, "there", True),
        ("entropy", 1.0, 1.03, "here", False),  # its start was trained elsewhere
        ("entropy", 1.0, 1.3, "here", True),
        ("entropy", 1.23456, 1.23457, "there", False),  # the last digit
        ("reverse_kl", 0.0, 5e-9, "here", False),  # of a policy from itself
        ("reverse_kl", 0.0, -5e-9, "here", False),
        ("reverse_kl", 0.0, 1e-3, "here", True),
    ],
)
def test_rounding_at_update_0_accuses_nobody(metric, recorded, again, here, accused) -> None:
    place = {"variant": "none", "beta": 0.0, "seed": 0, "update": 0, "metric": metric}
    row = {**place, "recorded": recorded, "again": again, "difference": abs(again - recorded)}
    rows = mismatches(pd.DataFrame([row]))
    assert ("already at update 0" in meaning(rows, "there", here)) == accused


def test_runs_are_compared_up_to_an_update_and_their_curves_are_written(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "curves.csv"
    few = ["--runs", "2", "--updates", "3", "--curves", str(target)]
    assert main(["reproduce", "small_cpu", *few]) == 0
    assert "2 of 2 runs agree to every digit of 4 updates" in capsys.readouterr().out
    again = read_table(target)
    assert sorted(again["update"].unique()) == [0, 2] and len(again) == 2 * 2
    assert mismatches(recording.compared(recording.load(recorded).curves, again)).empty


@pytest.mark.slow
def test_on_another_processor_another_checkout_gives_the_digits(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The other checkout is a copy of this one, and is asked by its public command."""
    other = tmp_path / "other"
    shutil.copytree(recorded, other / "results" / "small_cpu")
    ignored = shutil.ignore_patterns("__pycache__")
    for house in (kl_term, analysis):
        shutil.copytree(Path(house.__path__[0]), other / house.__name__, ignore=ignored)
    change_a_digit(recorded, "entropy", line=1)  # as on another processor
    few = ["reproduce", "small_cpu", "--runs", "2"]
    assert main(few) == 1
    assert main([*few, "--beside", str(other)]) == 0
    assert "2 of 2 runs agree" in capsys.readouterr().out
    train_differently(monkeypatch, after=2)
    assert main([*few, "--beside", str(other)]) == 1
    assert "the code here computes something else" in capsys.readouterr().err
    shutil.rmtree(other / "results")
    assert main([*few, "--beside", str(other)]) == 1
    assert "did not train small_cpu" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("preset", ["half_step", "process", "kdrl", "partial_rollouts", "mismatch"])
def test_a_slice_of_a_recording_comes_out_again(preset: str) -> None:
    """The policy at update 0 agrees to rounding on any processor; where it was recorded, all."""
    found = reproduction.reproduce(recording.folder_of(preset), runs=1, updates=1)
    assert "already at update 0" not in found.explanation
    assert found.agrees or found.here != found.recorded_on, found.summary


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smal_cpu"], "recording must be one of ['small_cpu'], got 'smal_cpu'; did you mean"),
        (["results/none"], "got 'results/none'"),
        (["small_cpu", "--runs", "0"], "runs must be at least 1, not 0"),
        (["small_cpu", "--updates", "0"], "updates must be at least 1, not 0"),
        (["small_cpu", "small_cpu", "--curves", "x.csv"], "--curves is of one recording"),
        (["tail_cpu"], "tail_cpu holds no trained population"),
    ],
)
def test_refusal_is_one_line_before_anything_is_trained(
    recorded: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(reproduction, "train", lambda *_, **__: pytest.fail("trained"))
    (recorded.parent / "tail_cpu").mkdir()
    fields = json.loads((recorded / "manifest.json").read_bytes())
    fields |= {"files": {}, "folder": "tail_cpu"}
    (recorded.parent / "tail_cpu" / "manifest.json").write_bytes(sealed(fields))
    assert main(["reproduce", *arguments]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_damaged_recording_is_refused(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recorded / "curves.csv").write_text("variant\n")
    assert main(["reproduce"]) == 1
    assert "curves.csv changed since" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "named", "out", "err"),
    [
        (Unavailable("x is not installed"), False, "small_cpu: skipped, x is not installed\n", ""),
        (
            Unavailable("x is not installed"),
            True,
            "",
            "analysis: small_cpu cannot be trained here: x is not installed\n",
        ),
        (ValueError("model is float64"), False, "", "analysis: model is float64\n"),
    ],
    ids=["skipped", "named", "another-error"],
)
def test_only_what_is_not_installed_is_skipped_unless_it_is_named(
    recorded: Path, monkeypatch, capsys, error: Exception, named: bool, out: str, err: str
) -> None:
    def refuse(config):
        raise error

    monkeypatch.setattr(reproduction, "environment_of", refuse)
    assert main(["reproduce", *["small_cpu"] * named]) == bool(err)
    assert tuple(capsys.readouterr()) == (out, err)


@pytest.mark.parametrize(
    "preset", [SMALL, equal_kl(), smollm2_short()], ids=lambda preset: preset.name
)
def test_runs_meet_every_variant_once_and_spread_the_seeds(preset: Preset) -> None:
    runs = chosen(preset)
    assert [m.variant for m in runs] == list(preset.variants)
    assert {m.seed for m in runs} == set(preset.seeds)
    assert chosen(preset, len(preset.runs)) == chosen(preset, 10**6) == preset.runs
    fewer, total = set(chosen(preset, 1)), len(preset.runs)
    for count in range(2, total + 1, max(1, total // 40)):  # each is in all that come later
        more = set(chosen(preset, count))
        assert fewer < more and len(more) == count
        fewer = more


def test_a_few_runs_are_of_variants_far_apart() -> None:
    places = [equal_kl().variants.index(run.variant) for run in chosen(equal_kl(), 4)]
    gaps = [
        b - a
        for a, b in zip(places, [*places[1:], places[0] + len(equal_kl().variants)], strict=True)
    ]
    assert max(gaps) <= len(equal_kl().variants) / 2


def test_what_is_measured_of_the_final_policy_comes_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = SMALL.model_copy(
        update={"config": SMALL.config.model_copy(update={"final_answers": 40})}
    )
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    folder = tmp_path / "small_cpu"
    with on_one_thread():
        recording.save(in_process.run(measured), folder)
        found = reproduction.reproduce(folder, runs=3)
    assert found.agrees
    finals = recording.load(folder).finals
    assert (finals["final_kl_error"] > 0.0).all()
    row = finals.index[[run in found.runs for run in measured.runs]][0]
    finals.loc[row, "final_reverse_kl"] *= 1.001
    (folder / "final.csv").write_text(finals.to_csv(index=False, float_format="%.6g"))
    files = {name: sha256_file(folder / name) for name in ("curves.csv", "final.csv")}
    change(folder / "manifest.json", lambda manifest: manifest | {"files": files})
    with on_one_thread():
        again = reproduction.reproduce(folder, runs=3)
        partial = reproduction.reproduce(folder, runs=3, updates=2)
    assert again.mismatches["metric"].tolist() == ["final_reverse_kl"]
    assert partial.agrees, "at other weights nothing is compared"
