"""Workers that start in milliseconds, and what an undisturbed run of the tiny sweep gives."""

from __future__ import annotations

import multiprocessing.forkserver

import pytest
import torch

from analysis.experiments.ablations.ablation import Ablation, run
from analysis.experiments.ablations.presets import Preset
from analysis.experiments.sweeps import inventory, sweep, workers
from tests.sweeps.tiny import STAMP, make_tiny


@pytest.fixture(scope="session", autouse=True)
def warm_workers() -> None:
    """Processes are forked from one that has imported what these tests need."""
    workers._context().set_forkserver_preload(["torch._dynamo", "tests.sweeps.tiny"])
    multiprocessing.forkserver.ensure_running()


@pytest.fixture(scope="package", autouse=True)
def one_stamp():
    """The tests of a working copy do not depend on edits made to it meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "source_of", lambda config: STAMP.source)
        patch.setattr(inventory, "source_of", lambda config: STAMP.source)
        yield


@pytest.fixture(autouse=True)
def alone(one_thread):
    """Each test here trains on one thread."""


@pytest.fixture(scope="session")
def tiny() -> Preset:
    return make_tiny()


@pytest.fixture(scope="session")
def straight(tiny: Preset) -> Ablation:
    """One process, one population, no checkpoint."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run(tiny)
    finally:
        torch.set_num_threads(threads)
