"""What all tests share: strict numerics are each test's own business, so it stays nearly empty."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

# Before torch is imported anywhere: one thread, as in the runs.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# Until all tests are collected nothing is garbage, and looking for it takes a third of the time.
gc.disable()

import pytest  # noqa: E402

from tests.trees import TREES, VOCAB_SIZE, on_one_thread  # noqa: E402


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is there now, modules and tests, lives until the end: no search looks at it again."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(params=TREES.values(), ids=TREES.keys())
def sequences(request: pytest.FixtureRequest):
    """Every sequence of a small tree."""
    from kl_term.kl.sequences import enumerate_sequences

    length, eos = request.param
    return enumerate_sequences(VOCAB_SIZE, length, eos=eos)


@pytest.fixture
def one_thread():
    """Torch on one thread, as in recorded runs: more of them sum in another order."""
    with on_one_thread():
        yield
