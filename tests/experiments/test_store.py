"""Stored runs: equal configurations share a file, and no changed bit goes unnoticed."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from analysis.records.preset import Preset
from analysis.records.recording import Recording
from analysis.records.run_record import Failure
from analysis.sweeps import sweep
from analysis.sweeps.store import (
    CorruptFile,
    Store,
    StoredRun,
    finished_runs,
    run_key,
    run_record,
    stored_runs,
    with_checksum,
    without_checksum,
)
from analysis.training.trainer import PopulationTrainer
from kl_term.errors import UserError
from tests.experiments.tiny import PROVENANCE, Heard, assert_same_bits, make_tiny, sweep_tiny

pytestmark = pytest.mark.usefixtures("tiny_source")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that holds the tiny sweep."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "source_of", lambda config: PROVENANCE.source)
        sweep_tiny(folder, Heard())
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return shutil.copytree(finished, tmp_path / "store")


def run_files(folder: Path) -> list[Path]:
    return sorted((folder / "runs").glob("*.json"))


def of(preset: Preset, row: int = 0) -> tuple:
    return preset.config, preset.runs[row]


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_finished_sweep_has_the_bits_of_a_straight_run_and_is_not_computed_again(
    folder: Path, straight: Recording
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_files(folder)}
    heard = Heard()
    assert_same_bits(sweep_tiny(folder, heard), straight)
    assert heard.text == "6 of 6 runs stored, 0 to compute\n"
    assert before == {path: path.stat().st_mtime_ns for path in run_files(folder)}


def test_another_sweep_reuses_the_runs_it_shares(folder: Path) -> None:
    heard = Heard()
    records = sweep_tiny(folder, heard, make_tiny(betas=(0.5, 2.0)))
    assert heard.text.startswith("6 of 8 runs stored, 2 to compute\n")
    assert len(records) == 8 and len(run_files(folder)) == 8


def test_one_configuration_written_in_two_ways_is_one_key(tiny: Preset) -> None:
    integer = tiny.config.model_copy(update={"temperature": 1})
    assert type(integer.temperature) is int
    run = tiny.runs[0]
    assert run_key(integer, run) == run_key(*of(tiny))


@pytest.mark.parametrize(
    "change",
    [{"temperature": math.nextafter(1.0, 2.0)}, {"updates": 25}, {"max_grad_norm": 0.5}],
    ids=str,
)
def test_configurations_that_differ_have_different_keys(tiny: Preset, change: dict) -> None:
    other = run_key(tiny.config.model_copy(update=change), tiny.runs[0])
    assert other != run_key(*of(tiny))


def test_a_configuration_that_is_not_valid_has_no_key(tiny: Preset) -> None:
    config = tiny.config.model_copy(update={"learning_rate": math.nan})
    with pytest.raises(ValidationError, match="learning_rate"):
        run_key(config, tiny.runs[0])


def test_on_equal_keys_the_configurations_decide(folder: Path, tiny: Preset) -> None:
    """As if two configurations had one hash: the other's result is never taken for its own."""
    store, source = Store(folder), PROVENANCE.source
    own, other = (store.path(*of(tiny, row), source) for row in (0, 1))
    other.write_bytes(own.read_bytes())
    with pytest.raises(CorruptFile, match="another configuration"):
        store.read(*of(tiny, 1), source)
    assert store.read(*of(tiny, 0), source) is not None


@pytest.mark.parametrize("size", [0, 1, 0.5, -1], ids=["empty", "one", "half", "all-but-one"])
def test_a_torn_file_is_noticed(folder: Path, tiny: Preset, size: float) -> None:
    store, source = Store(folder), PROVENANCE.source
    path = store.path(*of(tiny), source)
    data = path.read_bytes()
    path.write_bytes(data[: int(size * len(data)) if size == 0.5 else int(size)])
    with pytest.raises(CorruptFile):
        store.read(*of(tiny), source)


def test_a_damaged_run_is_named_set_aside_and_computed_again(
    folder: Path, straight: Recording
) -> None:
    spoilt, *rest = run_files(folder)
    digit = spoilt.read_bytes().index(b'"wall_seconds":') + len('"wall_seconds":')
    flip_bit(spoilt, 8 * digit)  # still JSON
    before = spoilt.read_bytes()
    kept = {path: path.read_bytes() for path in rest}
    heard = Heard()
    assert_same_bits(sweep_tiny(folder, heard), straight)
    aside = folder / "quarantine" / f"{spoilt.name}.1"
    said = f"{spoilt}: its checksum does not match; moved to {aside}, computed again\n"
    assert said in heard.text
    assert aside.read_bytes() == before
    assert {path: path.read_bytes() for path in rest} == kept


class OlderRecord(StoredRun):
    """As if an earlier version had stored one field more."""

    note: str


def test_a_run_of_another_schema_is_named_with_the_field(
    folder: Path, tiny: Preset, straight: Recording
) -> None:
    store, source = Store(folder), PROVENANCE.source
    record = store.read(*of(tiny), source)
    path = store.path(*of(tiny), source)
    path.write_bytes(with_checksum(OlderRecord(**dict(record), note="x")))
    heard = Heard()
    assert_same_bits(sweep_tiny(folder, heard), straight)
    assert f"{path}: written by another version: note: Extra inputs" in heard.text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: {n: v for n, v in m.items() if n != "entropy"}, "metric entropy is missing"),
        (lambda m: m | {"speed": m["k1"]}, "metric speed is unknown"),
        (lambda m: m | {"k1": m["k1"][1:]}, "metric k1 has 4 of 5 windows"),
    ],
)
def test_a_record_without_exactly_the_metrics_is_refused(folder: Path, change, named: str) -> None:
    record = without_checksum(run_files(folder)[0].read_bytes(), StoredRun)
    with pytest.raises(ValidationError, match=named):
        StoredRun(**(dict(record) | {"metrics": change(record.metrics)}))


def test_runs_of_an_older_source_are_kept_said_so_and_computed_anew(
    folder: Path, tiny: Preset, straight: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in run_files(folder)}
    newer = PROVENANCE.model_copy(update={"source": "f" * 64})
    monkeypatch.setattr(sweep, "source_of", lambda config: newer.source)
    heard = Heard()
    records = sweep_tiny(folder, heard)
    assert_same_bits(records, straight)
    assert {record.provenance.source for record in records} == {newer.source}
    assert "6 runs of an older source are kept as stale, computed anew\n" in heard.text
    assert len(run_files(folder)) == 12
    assert {path: path.read_bytes() for path in before} == before


def test_a_diverged_run_is_finished_with_its_reason(tmp_path: Path) -> None:
    """Its KL loss overflows on the stale pass of the first update; it logs NaN from there on."""
    preset = make_tiny(updates=8, betas=(3e38,))
    records = sweep_tiny(tmp_path, Heard(), preset)
    diverged = [record for record in records if record.failure is not None]
    assert [r.run.variant.name for r in diverged] == ["k3_loss", "k3_loss"]
    run = PopulationTrainer(preset.config, preset.runs).run()
    assert run_record(records).failures == run.failures != ()
    assert math.isnan(diverged[0].metrics["reward"][-1])
    heard = Heard()
    again = sweep_tiny(tmp_path, heard, preset)
    assert [with_checksum(record) for record in again] == [
        with_checksum(record) for record in records
    ]
    assert heard.text == "6 of 6 runs stored, 0 to compute\n"


def test_records_hold_infinite_and_missing_values_to_the_bit(straight: Recording) -> None:
    preset = make_tiny(updates=6)
    run = PopulationTrainer(preset.config, preset.runs[:2]).run()
    run.metrics["k3"][:, 0] = (math.inf, math.nan)
    run = run._replace(failures=(Failure(1, 4, 0, "logp"),))
    records = [
        without_checksum(with_checksum(record), StoredRun)
        for record in stored_runs(run, PROVENANCE)
    ]
    again = run_record(records)
    assert records[1].failure == Failure(0, 4, 0, "logp")
    assert again.failures == run.failures
    for name, values in run.metrics.items():
        assert again.metrics[name].dtype == values.dtype
        assert again.metrics[name].tobytes() == values.tobytes()


def test_an_unfinished_sweep_has_no_results(folder: Path, tiny: Preset) -> None:
    run_files(folder)[0].unlink()
    with pytest.raises(UserError, match="1 of 6 runs of 'tiny' are missing"):
        finished_runs(tiny, Store(folder), PROVENANCE.source)
