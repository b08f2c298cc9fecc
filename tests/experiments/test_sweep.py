"""``analysis sweep``: what it does, shows, records and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import validate_call

from analysis.cli.main import main
from analysis.records import recording
from analysis.records.preset import Preset
from analysis.records.recording import Recording
from analysis.studies.presets import PRESETS
from analysis.studies.presets.language import smollm2
from analysis.sweeps.memory import RUNS_PER_GPU_SHARD, shard_size
from tests.experiments.tiny import PROVENANCE, make_tiny

pytestmark = pytest.mark.usefixtures("tiny_source")


def tiny(*, updates: int = 24) -> object:
    return make_tiny(updates)


def diverging(*, updates: int = 8) -> object:
    return make_tiny(updates, betas=(3e38,), name="diverging")


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """``analysis sweep`` with tiny presets, in a folder of its own."""
    for preset in (tiny, diverging):
        monkeypatch.setitem(PRESETS, preset.__name__, validate_call(preset))
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: main(["sweep", *arguments])


def test_a_sweep_is_stored_listed_and_recorded(
    sweep, straight: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("tiny", "--workers", "1", "--record", "results/tiny") == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "0 of 6 runs stored, 6 to compute"
    assert said[-2:] == ["tiny: 6 runs finished, 0 diverged", "recorded in results/tiny"]
    assert len(list((tmp_path / "sweeps" / "runs").iterdir())) == 6

    recording.save(straight, tmp_path / "results" / "straight")
    one, two = (tmp_path / "results" / name for name in ("tiny", "straight"))
    for table in ("curves.csv", "final.csv"):
        assert (one / table).read_bytes() == (two / table).read_bytes()
    manifest = json.loads((one / "manifest.json").read_text())
    assert manifest["seeds"] == [0, 1] and manifest["source"] == PROVENANCE.source

    assert sweep("tiny", "--list") == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["variant", "beta", "stored", "missing"]
    assert rows[1].split() == ["k3_loss", "0.5", "2", "0"] and len(rows) == 3


def test_a_list_of_a_preset_shows_what_is_missing_and_computes_nothing(
    sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("tiny", "--list") == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[-2:] for row in rows] == [["0", "2"]] * 3
    assert not (tmp_path / "sweeps").exists()


def test_diverged_runs_are_named_and_counted(sweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("diverging", "--workers", "1") == 0
    said = capsys.readouterr().err
    assert "diverged: k3_loss beta=3e+38 seed=1 at update 0, gradient norm not finite\n" in said
    assert said.endswith("diverging: 6 runs finished, 2 diverged\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a preset: equal_kl, "),
        (["tinny"], "did you mean 'tiny'"),
        (["tiny", "-o", "updtes=3"], "did you mean 'updates'"),
        (["tiny", "-o", "updates=0"], "updates: Input should be greater than or equal to 1"),
        (["tiny", "-o", "updates"], "write it as name=value"),
        (["tiny", "--workers", "0"], "workers must be at least 1, not 0"),
        (["tiny", "--runs-per-shard", "-1"], "runs_per_shard must be at least 1, not -1"),
        (["tiny", "--device", "cuda"], "no GPU is visible here"),
        (["tiny", "--graphs"], "--graphs records CUDA graphs: give it with --device cuda"),
        (["tiny", "--store", "/proc/none"], "/proc/none/runs: cannot be written"),
    ],
)
def test_refusal_is_one_line_and_nothing_is_stored(
    sweep,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert sweep(*arguments) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "sweeps").exists()


def test_what_a_preset_needs_and_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lost = smollm2().model_dump()
    lost["config"]["model"] = {"kind": "folder", "path": str(tmp_path / "nowhere")}
    monkeypatch.setitem(PRESETS, "lost", lambda: Preset.model_validate(lost))
    assert main(["sweep", "lost", "--store", str(tmp_path / "store"), "--workers", "1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "nowhere") in line


def test_shards_leave_no_worker_idle() -> None:
    assert [shard_size(n, 2) for n in (1, 8, 47, 48, 500)] == [1, 4, 24, 24, 24]
    assert [shard_size(n, 1, RUNS_PER_GPU_SHARD) for n in (260, 10_400)] == [260, 512]


@pytest.mark.parametrize("kind", ["file", "here", "precious"])
def test_nothing_but_a_recording_is_replaced(sweep, kind, tmp_path, monkeypatch, capsys) -> None:
    target = tmp_path / "target"
    if kind == "file":
        target.write_text("thesis")
    else:
        target.mkdir()
        (target / "thesis.txt").write_text("thesis")
    place = "." if kind == "here" else str(target)
    if kind == "here":
        monkeypatch.chdir(target)
    assert main(["sweep", "tiny", "--record", place]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"analysis: {place}") and said.count("\n") == 1
    kept = target if kind == "file" else target / "thesis.txt"
    assert kept.read_text() == "thesis"


def test_an_error_of_the_system_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    def unreadable(*_):
        raise PermissionError(13, "Permission denied", str(tmp_path / "a"))

    monkeypatch.setattr("analysis.cli.sweep.parse_assignments", unreadable)
    assert main(["sweep", "tiny"]) == 1
    assert capsys.readouterr().err == f"analysis: {tmp_path / 'a'}: Permission denied\n"
