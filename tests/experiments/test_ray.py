"""A sweep on a Ray cluster: the bits of a local one, whatever is killed, or one line that says why.

The cluster has two workers on this machine; only the sweep's own process touches the store.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from analysis.cli.main import main
from analysis.records.preset import Preset
from analysis.records.recording import Recording
from analysis.studies.presets import make_preset
from analysis.sweeps import sweep
from analysis.sweeps.provenance import source_of
from analysis.sweeps.ray_pool import RayPool, ray_pool, room_for, shard_resources
from analysis.sweeps.shard import complete_shard
from analysis.sweeps.store import Store, finished_runs, shards_of
from tests.experiments.tiny import (
    PROVENANCE,
    UPDATES,
    Heard,
    assert_same_bits,
    assert_same_metrics,
    make_tiny,
    sweep_tiny,
)

pytestmark = pytest.mark.usefixtures("one_thread")
#: Long enough to be killed in the middle: each of its six runs takes seconds.
LONG = 400


def long_tiny(*, updates: int = LONG) -> Preset:
    return make_tiny(updates, name="long")


#: What else takes memory on this machine shall not kill tasks.
UNMONITORED = {"RAY_memory_monitor_refresh_ms": "0"}


def needs_ray(test: Callable) -> Callable:
    """Mark a test as one of ``make test-full``, and skip it where Ray is missing."""
    absent = importlib.util.find_spec("ray") is None
    return pytest.mark.peers(pytest.mark.skipif(absent, reason="ray is not installed")(test))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayPool]:
    os.environ |= UNMONITORED
    with ray_pool("local", workers=2) as cluster:
        yield cluster


def tasks(sweep: int | None = None) -> list[psutil.Process]:
    """The processes that train a shard now, of the cluster that ``sweep`` or this process began."""
    found = []
    for child in psutil.Process(sweep).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if child.cmdline()[:1] == ["ray::train_shard"]:
                found.append(child)
    return found


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 120.0
    while not true():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


@needs_ray
def test_a_cluster_computes_the_bits_of_a_straight_run(
    cluster: RayPool, tiny: Preset, straight: Recording, tmp_path: Path
) -> None:
    heard = Heard()
    assert_same_bits(sweep_tiny(tmp_path, heard, pool=cluster), straight)
    assert heard.computed == len(tiny.runs) * UPDATES
    assert heard.text.startswith("0 of 6 runs stored, 6 to compute\n")
    assert "of 144 run-updates" in heard.text and "run-updates/s" in heard.text
    assert not any(tmp_path.glob("checkpoints/*")) and not any(tmp_path.rglob("*.tmp"))

    again = Heard()
    sweep_tiny(tmp_path, again)  # by this machine alone: nothing is left to do
    assert again.text == "6 of 6 runs stored, 0 to compute\n"


@needs_ray
def test_a_killed_task_goes_on_from_its_checkpoint_to_the_same_bits(
    cluster: RayPool, tmp_path: Path
) -> None:
    preset, killed = long_tiny(), []

    def kill_one() -> None:
        until(lambda: any(tmp_path.glob("ray/checkpoints/*/*")) and tasks())
        for task in tasks():
            os.kill(task.pid, signal.SIGKILL)
            killed.append(task.pid)

    killer = threading.Thread(target=kill_one)
    killer.start()
    heard = Heard()
    records = sweep_tiny(tmp_path / "ray", heard, preset, pool=cluster)
    killer.join()
    assert killed
    assert "a worker ended by a crash or a kill; its 2 runs are tried again" in heard.text
    assert "2 runs go on from update " in heard.text
    here = sweep_tiny(tmp_path / "here", Heard(), preset, workers=2)
    assert_same_metrics(records, here)
    assert not any(tmp_path.glob("ray/checkpoints/*"))


@needs_ray
def test_a_machine_alone_goes_on_where_a_cluster_was_stopped(
    cluster: RayPool, tiny: Preset, straight: Recording, tmp_path: Path
) -> None:
    """The checkpoints are in the sweep's own store, whichever machine made them."""
    preset, source = long_tiny(), source_of(tiny.config)
    options = {"folder": tmp_path, "source": source, "checkpoint_every": 4}
    try:
        cluster.submit(partial(complete_shard, **options), 0, shards_of(preset, 2)[0])
        until(lambda: cluster.reports() and any(tmp_path.glob("checkpoints/*/*")))
    finally:
        cluster.close()
    heard = Heard()
    sweep_tiny(tmp_path, heard, preset)
    assert "2 runs go on from update " in heard.text


@needs_ray
def test_runs_that_another_process_computes_are_waited_for(
    cluster: RayPool, tiny: Preset, straight: Recording, tmp_path: Path
) -> None:
    store, heard = Store(tmp_path), Heard()
    with store.lock(shards_of(tiny, 2)[0]) as locked:
        assert locked
        thread = threading.Thread(
            target=sweep_tiny, args=(tmp_path, heard), kwargs={"pool": cluster}
        )
        thread.start()
        until(lambda: len(list(tmp_path.glob("runs/*.json"))) == 4)
        time.sleep(0.5)
        assert thread.is_alive()
    thread.join()
    assert_same_bits(finished_runs(tiny, store, source_of(tiny.config)), straight)


@needs_ray
def test_a_task_that_runs_another_source_is_refused(
    cluster: RayPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "source_of", lambda config: PROVENANCE.source)
    with pytest.raises(ValueError, match="the source changed since the sweep began"):
        sweep_tiny(tmp_path, Heard(), pool=cluster)
    assert not any(tmp_path.glob("runs/*.json"))


@needs_ray
def test_a_model_that_cannot_be_had_is_one_line(
    cluster: RayPool, tiny: Preset, tmp_path: Path
) -> None:
    lost = make_preset("smollm2", {}).model_dump()
    lost["config"]["model"] = {"kind": "folder", "path": str(tmp_path / "nowhere")}
    with pytest.raises(ValueError, match="nowhere") as refused:
        sweep_tiny(tmp_path, Heard(), Preset.model_validate(lost), pool=cluster)
    assert "\n" not in str(refused.value)


@needs_ray
def test_a_cluster_is_joined_by_its_address_and_may_lose_a_node(tmp_path: Path) -> None:
    """In a process of its own, because a process is in one cluster at a time."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.experiments.ray_nodes", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | UNMONITORED,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    refusal, *said, last = done.stdout.splitlines()
    assert refusal.startswith("no node of the Ray cluster ")
    assert refusal.endswith(" has 1 CPU for a shard: add one")
    assert "a worker ended by the loss of its node; its 6 runs are tried again" in said
    assert any(line.startswith("6 runs go on from update ") for line in said)
    assert last == "the same bits"


@needs_ray
def test_a_stopped_sweep_says_so_and_leaves_no_task(tmp_path: Path) -> None:
    sweep = subprocess.Popen(
        [
            *(sys.executable, "-m", "analysis", "sweep", "quick"),
            *("--ray-address", "local", "--workers", "1", "--store", str(tmp_path)),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | UNMONITORED,
    )
    assert sweep.stderr is not None
    assert sweep.stderr.readline() == "0 of 24 runs stored, 24 to compute\n"
    until(lambda: tasks(sweep.pid))
    family = psutil.Process(sweep.pid).children(recursive=True)
    sweep.send_signal(signal.SIGINT)
    _, said = sweep.communicate(timeout=120)
    assert (sweep.returncode, said) == (
        130,
        "analysis: stopped; earlier outputs are as they were\n",
    )
    assert not psutil.wait_procs(family, timeout=60)[1]


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where somebody listens and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def refused(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that is said; nothing is stored."""
    store = tmp_path / "store"
    assert main(["sweep", "quick", "--store", str(store), *arguments]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and not store.exists()
    return said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ray-address", "127.0.0.1:1"], "Ray cluster '127.0.0.1:1' does not answer: "),
        (["--ray-address", "ray://127.0.0.1:1"], "Ray cluster 'ray://127.0.0.1:1' does not answer"),
        (["--ray-address", "127.0.0.1:many"], "does not answer: invalid literal for int()"),
        (["--ray-address", "here"], "give 'local', 'auto', host:port or ray://host:port"),
        (["--ray-address", "local", "--workers", "0"], "workers must be at least 1, not 0"),
        (["--ray-address", "local", "--gpus-per-shard", "1"], "is for device 'cuda'"),
        (
            ["--ray-address", "local", "--device", "cuda", "--gpus-per-shard", "2"],
            "gpus_per_shard must be above 0 and at most 1, not 2",
        ),
        (["--gpus-per-shard", "1"], "--gpus-per-shard is for --ray-address"),
    ],
)
def test_refusal_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    """Before Ray does anything."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert message in refused(arguments, tmp_path, capsys)


@needs_ray
def test_a_port_that_never_answers_is_given_up(tmp_path: Path, silent: int) -> None:
    """In a process of its own, which ends while Ray still waits."""
    address = f"ray://127.0.0.1:{silent}"
    program = (
        "import sys; from analysis.cli.main import main\n"
        "from analysis.sweeps import ray_pool\n"
        "ray_pool.CONNECT_SECONDS = 1.0\n"
        f"sys.exit(main(['sweep', 'quick', '--ray-address', {address!r}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        timeout=120,
    )
    said = f"analysis: Ray cluster {address!r}: not ready in 1 s\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert not any(tmp_path.iterdir())


def test_without_ray_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = refused(["--ray-address", "local"], tmp_path, capsys)
    assert said == "analysis: ray is not installed: pip install -e '.[ray]'\n"


def test_a_machine_of_the_cluster_needs_what_training_needs_and_filelock() -> None:
    program = "import sys, analysis.sweeps.ray_pool as w; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert {"torch", "filelock", "pydantic"} <= loaded, done.stderr
    assert loaded.isdisjoint({"pandas", "matplotlib", "tyro", "psutil", "scipy", "ray", "yaml"})


def test_room_is_what_fits_on_each_node_and_none_on_two() -> None:
    nodes = [{"CPU": 3.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 8.0}, {"CPU": 64.0}, {}]
    assert room_for(shard_resources("cpu", None), nodes) == 68
    assert room_for(shard_resources("cuda", None), nodes) == 2
    assert room_for(shard_resources("cuda", 0.5), nodes) == 3
