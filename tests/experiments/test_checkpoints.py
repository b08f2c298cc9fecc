"""Going on from a checkpoint: the bits of a straight run, or a named refusal."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from analysis.records.metrics import METRICS
from analysis.records.preset import Preset
from analysis.records.recording import Recording
from analysis.sweeps import shard as shards
from analysis.sweeps.checkpoints import Checkpoints, Header
from analysis.sweeps.shard import complete_shard
from analysis.sweeps.store import Store, finished_runs, shards_of, with_checksum, without_checksum
from analysis.training.trainer import PopulationTrainer
from kl_term.files import sha256_bytes
from tests.experiments.tiny import PROVENANCE, Heard, assert_same_bits, make_tiny, sweep_tiny
from tests.trees import on_one_thread

pytestmark = pytest.mark.usefixtures("tiny_source")
(WHOLE,) = shards_of(make_tiny(), 6)


class Interrupted(Exception):
    """The test's own kill."""


def complete(folder: Path, report: Callable[[str | int], None]) -> None:
    source = PROVENANCE.source
    complete_shard(WHOLE, "cpu", report, folder=folder, source=source, checkpoint_every=4)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where six runs were interrupted after 10 updates, checkpoints at 4 and 8."""
    folder = tmp_path_factory.mktemp("interrupted")

    def interrupt(news: str | int) -> None:
        if news == 60:
            raise Interrupted

    with on_one_thread(), pytest.raises(Interrupted):
        complete(folder, interrupt)
    return folder


@pytest.fixture
def store(interrupted: Path, tmp_path: Path) -> Store:
    """A copy of it."""
    return Store(shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True))


def resume(store: Store) -> tuple[list[str], int]:
    """What was said, and the update from which it went on."""
    news: list[str | int] = []
    complete(store.root, news.append)
    return [n for n in news if isinstance(n, str)], next(n for n in news if isinstance(n, int)) // 6


def begin_again(store: Store) -> tuple[list[str], int]:
    """The same, interrupted before that update."""
    said: list[str] = []

    def hear(news: str | int) -> None:
        if isinstance(news, int):
            raise Interrupted(news // 6)
        said.append(news)

    with pytest.raises(Interrupted) as begun:
        complete(store.root, hear)
    return said, begun.value.args[0]


def files(store: Store) -> list[Path]:
    """Oldest first."""
    return sorted(store.checkpoints.glob("*/*"))


def assert_finished(store: Store, tiny: Preset, straight: Recording) -> None:
    assert_same_bits(finished_runs(tiny, store, PROVENANCE.source), straight)


def test_two_checkpoints_are_kept(store: Store, tiny: Preset) -> None:
    trainer = PopulationTrainer(tiny.config, tiny.runs)
    trainer.advance()
    checkpoints = Checkpoints(store.checkpoints, WHOLE)
    checkpoints.save(trainer.state()._replace(update=9), PROVENANCE)
    assert [path.name for path in files(store)] == ["00000008.checkpoint", "00000009.checkpoint"]


def test_resumed_and_straight_runs_are_equal_to_the_bit(
    store: Store, tiny: Preset, straight: Recording
) -> None:
    assert resume(store) == (["6 runs go on from update 8 of 24"], 8)
    assert_finished(store, tiny, straight)
    assert not files(store)


@pytest.mark.parametrize("beta", [0.5, 3e38], ids=["healthy", "diverging"])
def test_a_trainer_restored_at_any_update_is_the_one_that_went_on(beta: float) -> None:
    tiny = make_tiny(betas=(beta,))
    straight = PopulationTrainer(tiny.config, tiny.runs)
    resumed = PopulationTrainer(tiny.config, tiny.runs)
    for _ in range(7):
        straight.advance()
        resumed.advance()
        state, resumed = resumed.state(), PopulationTrainer(tiny.config, tiny.runs)
        resumed.restore(state)
        assert torch.equal(resumed.weights, straight.weights)
        assert resumed.record().failures == straight.record().failures
        for name in METRICS:
            left, right = (t.record().metrics[name] for t in (resumed, straight))
            assert left.tobytes() == right.tobytes()


def flip(place: float) -> Callable[[Path], None]:
    """Change one bit, at a share of the file."""

    def spoil(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(place * len(data))] ^= 1
        path.write_bytes(data)

    return spoil


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    "spoil",
    [flip(0.001), flip(0.5), truncate],
    ids=["header", "tensors", "truncated"],
)
def test_a_corrupt_checkpoint_is_named_and_the_one_before_is_used(
    store: Store, tiny: Preset, straight: Recording, spoil: Callable[[Path], None]
) -> None:
    spoilt = files(store)[1]
    spoil(spoilt)
    said, first = resume(store)
    assert first == 4
    assert said[0].startswith(f"{spoilt}: ")
    assert f"moved to {store.root / 'quarantine'}" in said[0]
    assert_finished(store, tiny, straight)


def test_with_both_corrupt_the_runs_start_over(
    store: Store, tiny: Preset, straight: Recording
) -> None:
    for path in files(store):
        flip(0.5)(path)
    said, first = resume(store)
    assert first == 0 and len(said) == 2
    assert len(list((store.root / "quarantine").iterdir())) == 2
    assert_finished(store, tiny, straight)


def vouch_for(path: Path, data: bytes, **changes: object) -> None:
    """Put other tensors into a checkpoint, with a header that vouches for them."""
    line = path.read_bytes().partition(b"\n")[0]
    fields = {"tensors_sha256": sha256_bytes(data), **changes}
    header = without_checksum(line, Header).model_copy(update=fields)
    path.write_bytes(with_checksum(header) + b"\n" + data)


class Payload:
    """Would be run by whoever unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_a_pickle_is_refused_and_not_run(store: Store, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    payload = pickle.dumps(Payload(mark))
    pickle.loads(payload)
    assert mark.exists(), "the payload must work"
    mark.unlink()
    vouch_for(files(store)[1], payload)
    said, first = begin_again(store)
    assert "its tensors are no safetensors" in said[0]
    assert first == 4 and not mark.exists()


def tensors_of(path: Path) -> bytes:
    return path.read_bytes().partition(b"\n")[2]


@pytest.mark.parametrize("name", ["weights", "optimizer.exp_avg_sq", "alive", "logged.k1"])
def test_a_missing_tensor_is_named(store: Store, name: str) -> None:
    path = files(store)[1]
    tensors = safetensors.torch.load(tensors_of(path))
    del tensors[name]
    vouch_for(path, safetensors.torch.save(tensors))
    said, first = begin_again(store)
    assert f"lacks the tensor {name!r}" in said[0] and first == 4


def test_a_checkpoint_of_other_runs_is_not_taken_for_this_one_s(store: Store) -> None:
    path = files(store)[1]
    other = WHOLE.model_copy(update={"runs": WHOLE.runs[:5]})
    vouch_for(path, tensors_of(path), shard=other)
    said, first = begin_again(store)
    assert "is of other runs than its folder says" in said[0] and first == 4


@pytest.mark.parametrize("changed", ["source", "device", "versions"])
def test_a_checkpoint_made_under_something_else_is_discarded(
    store: Store, tiny: Preset, straight: Recording, changed: str, monkeypatch
) -> None:
    real = shards.provenance_here
    value = {"torch": "0"} if changed == "versions" else "f" * 64

    def elsewhere(*arguments: object) -> object:
        return real(*arguments).model_copy(update={changed: value})

    with monkeypatch.context() as patch:
        patch.setattr(shards, "provenance_here", elsewhere)
        said, first = resume(store)
    assert "of another source, machine or version; its runs start over" in said[0]
    assert first == 0 and not files(store)


def test_checkpoints_of_runs_that_finished_in_other_shards_are_removed(store: Store) -> None:
    assert files(store)
    sweep_tiny(store.root, Heard())
    assert not files(store)
