"""Going on from a checkpoint: the bits of a straight run, or a named refusal."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from analysis.experiments.ablations.presets import Preset
from analysis.experiments.ablations.stamp import Stamp
from analysis.experiments.sweeps.checkpoints import Checkpoints, Manifest, Population
from analysis.experiments.sweeps.sealed import seal, unseal
from analysis.experiments.sweeps.shards import Job, complete, shards_of
from analysis.experiments.sweeps.store import Store
from analysis.files import sha256_bytes
from analysis.training.metrics import METRICS
from analysis.training.trainer import PopulationTrainer
from tests.sweeps.tiny import STAMP, Heard, assert_same_bits, make_tiny, sweep_tiny


class Interrupted(Exception):
    """The test's own kill."""


@pytest.fixture
def stamp() -> Stamp:
    return STAMP


@pytest.fixture
def job(tmp_path: Path, stamp: Stamp) -> Job:
    """A store in which six members were interrupted after 10 updates, checkpoints at 4 and 8."""
    job = Job(tmp_path, stamp, "cpu", checkpoint_every=4)

    def interrupt(members: int, updates: int) -> None:
        if updates == 10:
            raise Interrupted

    with pytest.raises(Interrupted):
        complete(shards_of(make_tiny(), 6)[0], job, say=lambda text: None, advanced=interrupt)
    return job


def resume(job: Job) -> tuple[list[str], int]:
    """What was said, and the update from which it went on."""
    said: list[str] = []
    updates: list[int] = []
    complete(
        shards_of(make_tiny(), 6)[0],
        job,
        say=said.append,
        advanced=lambda _, done: updates.append(done),
    )
    return said, updates[0]


def files(job: Job, suffix: str) -> list[Path]:
    """Oldest first."""
    return sorted((job.store / "checkpoints").glob(f"*/*{suffix}"))


def results(job: Job, preset: Preset):
    store = Store(job.store)
    return [store.read(spec, job.stamp.source) for spec in shards_of(preset, 6)[0].specs]


def test_two_generations_are_kept(job: Job, tiny: Preset, stamp: Stamp) -> None:
    population = Population(config=tiny.config, members=tiny.members)
    checkpoints = Checkpoints(job.store / "checkpoints", population, stamp)
    trainer = PopulationTrainer(tiny.config, tiny.members)
    checkpoints.restore(trainer, Store(job.store).quarantine, pytest.fail)
    trainer.advance()
    checkpoints.save(trainer.state())
    names = [path.name for path in files(job, "")]
    assert names == [f"0000000{n}.{kind}" for n in (8, 9) for kind in ("json", "safetensors")]


def test_resumed_and_straight_runs_are_equal_to_the_bit(job: Job, tiny: Preset, straight) -> None:
    said, first = resume(job)
    assert (said, first) == (["6 members go on from update 8 of 24"], 8)
    assert_same_bits(results(job, tiny), straight)
    assert not files(job, "")


@pytest.mark.parametrize("beta", [0.5, 3e38], ids=["healthy", "diverging"])
def test_a_trainer_restored_at_any_update_is_the_one_that_went_on(beta: float) -> None:
    tiny = make_tiny(betas=(beta,))
    straight = PopulationTrainer(tiny.config, tiny.members)
    resumed = PopulationTrainer(tiny.config, tiny.members)
    for _ in range(7):
        straight.advance()
        resumed.advance()
        state, resumed = resumed.state(), PopulationTrainer(tiny.config, tiny.members)
        resumed.restore(state)
        assert torch.equal(resumed.weights, straight.weights)
        assert resumed.record().failures == straight.record().failures
        for name in METRICS:
            left, right = (t.record().metrics[name] for t in (resumed, straight))
            assert left.tobytes() == right.tobytes()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("spoil", [flip, truncate, Path.unlink])
def test_damaged_tensors_are_named_and_the_generation_before_is_used(
    job: Job, tiny: Preset, straight, spoil: Callable[[Path], None]
) -> None:
    spoilt = files(job, ".safetensors")[1]
    spoil(spoilt)
    said, first = resume(job)
    assert first == 4
    assert f"{spoilt.with_suffix('.json')}: 00000008.safetensors " in said[0]
    assert f"moved to {job.store / 'quarantine'}" in said[0]
    assert_same_bits(results(job, tiny), straight)


@pytest.mark.parametrize("spoil", [flip, truncate])
def test_a_damaged_manifest_is_named_and_the_generation_before_is_used(
    job: Job, tiny: Preset, straight, spoil: Callable[[Path], None]
) -> None:
    spoilt = files(job, ".json")[1]
    spoil(spoilt)
    said, first = resume(job)
    assert first == 4 and said[0].startswith(f"{spoilt}: ")
    assert_same_bits(results(job, tiny), straight)


def test_with_both_generations_damaged_the_members_start_over(
    job: Job, tiny: Preset, straight
) -> None:
    for path in files(job, ".safetensors"):
        flip(path)
    said, first = resume(job)
    assert first == 0 and len(said) == 4
    assert len(list((job.store / "quarantine").iterdir())) == 4
    assert_same_bits(results(job, tiny), straight)


def reseal(path: Path, data: bytes) -> None:
    """Put other tensors into a checkpoint, with a manifest that vouches for them."""
    manifest = unseal(path.read_bytes(), Manifest)
    path.with_suffix(".safetensors").write_bytes(data)
    path.write_bytes(seal(manifest.model_copy(update={"tensors_sha256": sha256_bytes(data)})))


class Payload:
    """Would be run by whoever unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_a_pickle_is_refused_and_not_run(job: Job, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    payload = pickle.dumps(Payload(mark))
    pickle.loads(payload)
    assert mark.exists(), "the payload must work"
    mark.unlink()
    reseal(files(job, ".json")[1], payload)
    said, first = resume(job)
    assert "00000008.safetensors is no safetensors file" in said[0]
    assert first == 4 and not mark.exists()


@pytest.mark.parametrize("name", ["weights", "optimizer.exp_avg_sq", "alive", "logged.k1"])
def test_a_missing_tensor_is_named(job: Job, name: str) -> None:
    path = files(job, ".json")[1]
    tensors = safetensors.torch.load(path.with_suffix(".safetensors").read_bytes())
    del tensors[name]
    reseal(path, safetensors.torch.save(tensors))
    said, first = resume(job)
    assert f"lacks the tensor '{name}'" in said[0] and first == 4


def test_a_checkpoint_of_another_source_is_not_taken_up(job: Job) -> None:
    newer = job.stamp.model_copy(update={"source": "f" * 64})
    said, first = resume(job._replace(stamp=newer))
    assert "of another source, machine or version; its members start over" in said[0]
    assert first == 0


def test_checkpoints_of_members_that_other_shards_finished_are_removed(job: Job, straight) -> None:
    records = sweep_tiny(job.store, Heard())  # in shards of two
    assert_same_bits(records, straight)
    assert not files(job, "")


def test_a_checkpoint_of_other_members_is_set_aside(job: Job, tiny: Preset) -> None:
    path = files(job, ".json")[1]
    manifest = unseal(path.read_bytes(), Manifest)
    other = Population(config=tiny.config, members=tiny.members[:3])
    path.write_bytes(seal(manifest.model_copy(update={"population": other})))
    said, first = resume(job)
    assert "is of other members than its folder says" in said[0] and first == 4
