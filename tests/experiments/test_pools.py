"""Where local workers compute: on the CPU, or each on a GPU of its own, in turn."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch

from analysis.sweeps import pools, shard
from analysis.sweeps.pools import LocalPool, devices_of
from analysis.sweeps.shard import complete_shard
from analysis.sweeps.sweep import shards_of
from kl_term.errors import UserError
from tests.experiments.tiny import PROVENANCE, make_tiny

pytestmark = pytest.mark.usefixtures("warm_workers")


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch would show them; no process touches any."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


def name_device(shard, device, report):
    report(device)
    return True


@pytest.mark.parametrize(
    ("device", "workers", "used"),
    [("cuda", 5, {0: 2, 1: 2, 2: 1}), ("cuda", 2, {0: 1, 1: 1}), ("cuda:2", 2, {2: 2})],
)
def test_each_worker_keeps_to_one_gpu_and_they_take_turns(
    three_gpus: None, monkeypatch: pytest.MonkeyPatch, device: str, workers: int, used: dict
) -> None:
    monkeypatch.setattr(pools, "_Worker", Noted)
    pool = LocalPool(device, workers)
    (shards,) = shards_of(make_tiny(), 6)
    for number in range(workers):
        pool.submit(name_device, number, shards)
    devices = Counter(worker.device for worker in pool._busy.values())
    assert devices == {f"cuda:{gpu}": count for gpu, count in used.items()}


class Noted:
    """A worker that is never begun."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.executor = self

    def submit(self, *_: object) -> object:
        return object()


def test_a_worker_is_used_again_and_ends_with_its_pool() -> None:
    pool = LocalPool("cpu", 1)
    (whole,) = shards_of(make_tiny(), 6)
    for number in (3, 4):
        future = pool.submit(name_device, number, whole)
        wait([future])
        assert pool.reports() == [(number, "cpu")] and pool.result(future)
    assert len(pool._idle) == 1
    pool.close()
    assert not pool._idle and devices_of("cpu") == ["cpu"]


def test_a_gpu_that_cannot_record_graphs_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object, **__: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(shard, "_train", cannot)
    (whole,) = shards_of(make_tiny(), 6)
    options = {"folder": tmp_path, "source": PROVENANCE.source, "checkpoint_every": 50}
    with pytest.raises(UserError, match="go on without --graphs") as said:
        complete_shard(whole, "cpu", print, **options, graphs=True)
    assert str(said.value).startswith("with CUDA graphs: operation not permitted when stream")
    assert "\n" not in str(said.value)
    with pytest.raises(RuntimeError, match="capturing"):
        complete_shard(whole, "cpu", print, **options)
