"""Where local workers compute: on the CPU, or each on a GPU of its own, in turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from analysis.experiments.sweeps import crew, workers
from analysis.experiments.sweeps.crew import Order
from analysis.experiments.sweeps.shards import Job, shards_of
from analysis.experiments.sweeps.workers import ThisMachine, devices_of
from tests.sweeps.tiny import STAMP, make_tiny


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch would show them; no process is started on any."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        workers,
        "stamp_here",
        lambda source, device, threads: STAMP.model_copy(update={"device": f"model of {device}"}),
    )
    monkeypatch.setattr(workers, "LocalCrew", list)


def jobs(device: str, count: int, shards: int) -> list[Job]:
    order = Order(Path("store"), make_tiny().config, STAMP.source, 50, shards)
    return list(ThisMachine(device, count).crew(order))


def test_each_worker_keeps_to_one_gpu_and_they_take_turns(three_gpus: None) -> None:
    found = jobs("cuda", 5, shards=10)
    assert [job.device for job in found] == ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1"]
    assert all(job.stamp.device == f"model of {job.device}" for job in found)


def test_no_worker_is_started_without_a_shard(three_gpus: None) -> None:
    assert [job.device for job in jobs("cuda", 3, shards=2)] == ["cuda:0", "cuda:1"]


def test_a_named_gpu_or_the_cpu_is_one_device(three_gpus: None) -> None:
    assert [job.device for job in jobs("cuda:2", 2, shards=9)] == ["cuda:2", "cuda:2"]
    assert devices_of("cpu") == ["cpu"]


def test_graphs_reach_the_job_and_a_gpu_that_cannot_record_them_says_so(
    three_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Order(Path("store"), make_tiny().config, STAMP.source, 50, 1, graphs=True)
    (job,) = ThisMachine("cuda", 1).crew(order)
    assert job.graphs and not jobs("cuda", 1, shards=1)[0].graphs

    def cannot(*_: object, **__: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(crew, "complete", cannot)
    (shard,) = shards_of(make_tiny(), 6)
    (said, *more) = crew.attempt(shard, job, lambda event: None)
    assert not more
    assert said.startswith("with CUDA graphs: operation not permitted when stream is capturing;")
    assert "without --graphs" in said and "\n" not in said
    with pytest.raises(RuntimeError, match="capturing"):
        crew.attempt(shard, job._replace(graphs=False), lambda event: None)
