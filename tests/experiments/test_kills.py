"""SIGKILL to a sweep and to its workers: nothing finished is lost, and the others go on."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from analysis.experiments import pools, sweep
from analysis.experiments.pools import LocalPool
from analysis.experiments.store import Store
from tests.experiments.tiny import (
    PROVENANCE,
    UPDATES,
    Heard,
    assert_same_bits,
    make_tiny,
    sweep_process,
    sweep_tiny,
)

pytestmark = pytest.mark.usefixtures("tiny_source")


def started(*arguments: object) -> BaseProcess:
    process = pools._context().Process(target=sweep_process, args=arguments)
    process.start()
    return process


def stored(folder: Path) -> set[Path]:
    """Checkpoints and finished runs."""
    return {*folder.glob("checkpoints/*/*"), *folder.glob("runs/*.json")}


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


def test_killed_workers_are_replaced_and_the_others_go_on(straight, tmp_path, monkeypatch):
    """Again in another folder where a kill met only workers that had nothing to do."""
    monkeypatch.setattr(sweep, "MAX_DEATHS", 1000)
    chance = random.Random(1)

    def kill_some(folder: Path, over: threading.Event) -> None:
        for _ in range(5):
            before = stored(folder)
            while stored(folder) == before and not over.wait(0.001):
                pass
            over.wait(chance.uniform(0.0, 0.05))
            for child in multiprocessing.active_children()[:1]:
                os.kill(child.pid, signal.SIGKILL)

    for folder in (tmp_path / str(n) for n in range(20)):
        heard, over = Heard(), threading.Event()
        killer = threading.Thread(target=kill_some, args=(folder, over))
        killer.start()
        try:
            records = sweep_tiny(folder, heard, workers=2)
        finally:
            over.set()
            killer.join()
        assert_same_bits(records, straight)
        if "a worker ended by a kill or a crash; its 2 runs are tried again" in heard.text:
            break
    else:
        pytest.fail("no kill met a worker at work")


def test_a_killed_worker_takes_no_other_with_it(tmp_path):
    """The worker of the first shard dies twice; that of the second is never begun again."""
    marks = tmp_path / "marks"
    marks.mkdir()
    pool, progress, tiny = LocalPool(workers=2), Heard(), make_tiny()
    shards = sweep.shards_of(tiny, 3)
    progress.begin(6, [3, 3], UPDATES)
    sweep._map(partial(die_twice, marks=marks), shards, pool, progress)
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
    assert_same_bits(sweep.finished_runs(tiny, store, source), straight)
