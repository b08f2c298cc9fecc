"""Workers that start in milliseconds, and what an undisturbed run of the tiny sweep gives."""

from __future__ import annotations

import multiprocessing.forkserver

import pytest

from analysis.records.preset import Preset
from analysis.records.recording import Recording
from analysis.sweeps import in_process, pools, store, sweep
from tests.experiments.tiny import PROVENANCE, make_tiny
from tests.trees import on_one_thread


@pytest.fixture(scope="session")
def warm_workers() -> None:
    """Processes are forked from one that has imported what these tests need."""
    pools._context().set_forkserver_preload(["torch._dynamo", "tests.experiments.tiny"])
    multiprocessing.forkserver.ensure_running()


@pytest.fixture
def tiny_source(warm_workers: None, one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of a working copy do not depend on edits made to it meanwhile."""
    monkeypatch.setattr(sweep, "source_of", lambda config: PROVENANCE.source)
    monkeypatch.setattr(store, "source_of", lambda config: PROVENANCE.source)


@pytest.fixture(scope="session")
def tiny() -> Preset:
    return make_tiny()


@pytest.fixture(scope="session")
def straight(tiny: Preset) -> Recording:
    """One process, one population, no checkpoint."""
    with on_one_thread():
        return in_process.run(tiny)
