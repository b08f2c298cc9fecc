"""Stored members: equal configurations share a file, and no changed bit goes unnoticed."""

from __future__ import annotations

import math
import random
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from analysis.errors import Refused
from analysis.experiments.ablations.ablation import Ablation
from analysis.experiments.ablations.presets import Preset
from analysis.experiments.sweeps import sweep
from analysis.experiments.sweeps.sealed import Damaged, canonical, seal, unseal
from analysis.experiments.sweeps.store import (
    MemberFailure,
    MemberRecord,
    MemberSpec,
    Store,
    member_records,
    population_record,
)
from analysis.kl.term import KLTerm
from analysis.training.config import Arm, Member
from analysis.training.records import Failure
from analysis.training.trainer import PopulationTrainer
from tests.sweeps.tiny import STAMP, Heard, assert_same_bits, make_tiny, sweep_tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that holds the tiny sweep."""
    folder = tmp_path_factory.mktemp("finished")
    sweep_tiny(folder, Heard())
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return shutil.copytree(finished, tmp_path / "store")


def member_files(folder: Path) -> list[Path]:
    return sorted((folder / "members").glob("*.json"))


def spec_of(preset: Preset, row: int = 0) -> MemberSpec:
    return MemberSpec(config=preset.config, member=preset.members[row])


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_finished_sweep_has_the_bits_of_a_straight_run_and_is_not_computed_again(
    folder: Path, straight: Ablation
) -> None:
    before = {path: path.stat().st_mtime_ns for path in member_files(folder)}
    heard = Heard()
    assert_same_bits(sweep_tiny(folder, heard), straight)
    assert heard.text == "6 of 6 members stored, 0 to compute\n"
    assert before == {path: path.stat().st_mtime_ns for path in member_files(folder)}


def test_another_sweep_reuses_the_members_it_shares(folder: Path) -> None:
    heard = Heard()
    records = sweep_tiny(folder, heard, make_tiny(betas=(0.5, 2.0)))
    assert heard.text.startswith("6 of 8 members stored, 2 to compute\n")
    assert len(records) == 8 and len(member_files(folder)) == 8


def test_one_configuration_written_in_two_ways_is_one_key(tiny: Preset) -> None:
    integer = tiny.config.model_copy(update={"temperature": 1})
    assert type(integer.temperature) is int
    member = tiny.members[0]
    assert MemberSpec(config=integer, member=member).key == spec_of(tiny).key


@pytest.mark.parametrize(
    "change",
    [{"temperature": math.nextafter(1.0, 2.0)}, {"updates": 25}, {"max_grad_norm": 0.5}],
    ids=str,
)
def test_configurations_that_differ_have_different_keys(tiny: Preset, change: dict) -> None:
    other = MemberSpec(config=tiny.config.model_copy(update=change), member=tiny.members[0])
    assert other.key != spec_of(tiny).key


def test_members_that_differ_have_different_keys(tiny: Preset) -> None:
    assert len({spec_of(tiny, row).key for row in range(6)}) == 6


def test_a_configuration_that_is_not_valid_has_no_key(tiny: Preset) -> None:
    config = tiny.config.model_copy(update={"learning_rate": math.nan})
    with pytest.raises(ValidationError, match="learning_rate"):
        MemberSpec(config=config, member=tiny.members[0]).key  # noqa: B018


def test_on_equal_keys_the_configurations_decide(folder: Path, tiny: Preset) -> None:
    """As if two configurations had one hash: the other's result is never taken for its own."""
    store, source = Store(folder), STAMP.source
    own, other = (store.path(spec_of(tiny, row), source) for row in (0, 1))
    other.write_bytes(own.read_bytes())
    with pytest.raises(Damaged, match="another configuration"):
        store.read(spec_of(tiny, 1), source)
    assert store.read(spec_of(tiny, 0), source) is not None


def test_every_flipped_bit_is_noticed(folder: Path, tiny: Preset) -> None:
    store, source = Store(folder), STAMP.source
    path = store.path(spec_of(tiny), source)
    intact = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(intact)), 200):
        flip_bit(path, bit)
        with pytest.raises(Damaged):
            store.read(spec_of(tiny), source)
        path.write_bytes(intact)
    assert store.read(spec_of(tiny), source) is not None


@pytest.mark.parametrize("size", [0, 1, 0.5, -1], ids=["empty", "one", "half", "all-but-one"])
def test_a_torn_file_is_noticed(folder: Path, tiny: Preset, size: float) -> None:
    store, source = Store(folder), STAMP.source
    path = store.path(spec_of(tiny), source)
    data = path.read_bytes()
    path.write_bytes(data[: int(size * len(data)) if size == 0.5 else int(size)])
    with pytest.raises(Damaged):
        store.read(spec_of(tiny), source)


def test_a_damaged_member_is_named_set_aside_and_computed_again(
    folder: Path, straight: Ablation
) -> None:
    spoilt, *rest = member_files(folder)
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


class OlderRecord(MemberRecord):
    """As if an earlier version had stored one field more."""

    note: str


def test_a_member_of_another_schema_is_named_with_the_field(
    folder: Path, tiny: Preset, straight: Ablation
) -> None:
    store, source = Store(folder), STAMP.source
    record = store.read(spec_of(tiny), source)
    path = store.path(spec_of(tiny), source)
    path.write_bytes(seal(OlderRecord(**dict(record), note="x")))
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
    record = unseal(member_files(folder)[0].read_bytes(), MemberRecord)
    with pytest.raises(ValidationError, match=named):
        MemberRecord(**(dict(record) | {"metrics": change(record.metrics)}))


def test_members_of_an_older_source_are_kept_said_so_and_computed_anew(
    folder: Path, tiny: Preset, straight: Ablation, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in member_files(folder)}
    newer = STAMP.model_copy(update={"source": "f" * 64})
    monkeypatch.setattr(sweep, "source_of", lambda config: newer.source)
    heard = Heard()
    records = sweep_tiny(folder, heard)
    assert_same_bits(records, straight)
    assert {record.stamp.source for record in records} == {newer.source}
    assert "6 members of an older source are kept as stale, computed anew\n" in heard.text
    assert len(member_files(folder)) == 12
    assert {path: path.read_bytes() for path in before} == before


def test_a_diverged_member_is_finished_with_its_reason(tmp_path: Path) -> None:
    """Its KL loss overflows on the stale pass of the first update; it logs NaN from there on."""
    preset = make_tiny(updates=8, betas=(3e38,))
    records = sweep_tiny(tmp_path, Heard(), preset)
    diverged = [record for record in records if record.failure is not None]
    assert [r.spec.member.arm.name for r in diverged] == ["k3_loss", "k3_loss"]
    run = PopulationTrainer(preset.config, preset.members).run()
    assert population_record(records).failures == run.failures != ()
    assert math.isnan(diverged[0].metrics["reward"][-1])
    heard = Heard()
    again = sweep_tiny(tmp_path, heard, preset)
    assert [seal(record) for record in again] == [seal(record) for record in records]
    assert heard.text == "6 of 6 members stored, 0 to compute\n"


def test_records_hold_infinite_and_missing_values_to_the_bit(straight: Ablation) -> None:
    preset = make_tiny(updates=6)
    run = PopulationTrainer(preset.config, preset.members[:2]).run()
    run.metrics["k3"][:, 0] = (math.inf, math.nan)
    run = run._replace(failures=(Failure(1, 4, 0, "logp"),))
    records = [unseal(seal(record), MemberRecord) for record in member_records(run, STAMP)]
    again = population_record(records)
    assert records[1].failure == MemberFailure(update=4, step=0, tensor="logp")
    assert again.failures == run.failures
    for name, values in run.metrics.items():
        assert again.metrics[name].dtype == values.dtype
        assert again.metrics[name].tobytes() == values.tobytes()


def test_equal_bodies_are_equal_bytes(tiny: Preset) -> None:
    one = Member(arm=Arm(kl=KLTerm(estimator="k1"), beta=1.0), seed=3)
    two = Member.model_validate_json('{"seed":3,"arm":{"beta":1,"kl":{"estimator":"k1"}}}')
    assert canonical(one) == canonical(two)


def test_an_unfinished_sweep_has_no_results(folder: Path, tiny: Preset) -> None:
    member_files(folder)[0].unlink()
    with pytest.raises(Refused, match="1 of 6 members of 'tiny' are missing"):
        sweep.finished_members(tiny, Store(folder), STAMP.source)
