"""SIGKILL to a sweep and to its workers: nothing finished is lost, and the others go on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial
from multiprocessing.process import BaseProcess

import psutil
import pytest

from analysis.sweeps import pools, sweep
from analysis.sweeps.pools import LocalPool
from analysis.sweeps.store import Store, finished_runs
from tests.experiments.tiny import (
    PROVENANCE,
    UPDATES,
    Heard,
    assert_same_bits,
    make_tiny,
    sweep_process,
    sweep_tiny,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tiny_source")]


def started(*arguments: object) -> BaseProcess:
    process = pools._context().Process(target=sweep_process, args=arguments)
    process.start()
    return process


def test_workers_do_not_outlive_a_sweep_that_is_killed(tmp_path):
    """What else a kill must leave as it is: ``torture.sweeps.kills``, in tests/torture."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = started(tmp_path, 2, sender)
    receiver.recv()  # it has begun
    while not (workers := psutil.Process(process.pid).children(recursive=True)):
        process.join(timeout=0.001)
    process.kill()
    process.join()
    assert not psutil.wait_procs(workers, timeout=60)[1]


def test_a_killed_worker_takes_no_other_with_it(tmp_path):
    """The worker of the first shard dies twice; that of the second is never begun again."""
    marks = tmp_path / "marks"
    marks.mkdir()
    pool, progress, tiny = LocalPool(workers=2), Heard(), make_tiny()
    shards = sweep.shards_of(tiny, 3)
    progress.begin(6, [3, 3], UPDATES)
    pools.finish_shards(partial(die_twice, marks=marks), shards, pool, progress)
    assert sorted(path.name[:4] for path in marks.iterdir()) == ["k3_l", "none", "none", "none"]
    assert not multiprocessing.active_children()


def die_twice(shard, device, report, *, marks):
    """The first shard begins with ``none``; each begin leaves a mark."""
    name = shard.runs[0].variant.name
    begun = len(list(marks.glob(f"{name}*")))
    (marks / f"{name}-{begun}").touch()
    if name == "none" and begun < 2:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)
    return True


def test_a_shard_that_always_kills_its_worker_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "complete_shard", die)
    with pytest.raises(ValueError, match=r"2 runs from none on ended their worker 3 times"):
        sweep_tiny(tmp_path, Heard())
    assert not multiprocessing.active_children()


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def test_concurrent_sweeps_compute_each_run_once(tiny, straight, tmp_path):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    processes = [started(tmp_path, 1, sender) for _ in range(3)]
    said = [receiver.recv() for _ in range(2 * len(processes))]
    computed = [count for count in said if count is not None]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sum(computed) == len(tiny.runs) * UPDATES
    store, source = Store(tmp_path), PROVENANCE.source
    assert_same_bits(finished_runs(tiny, store, source), straight)
