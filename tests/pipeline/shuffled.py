"""``pytest -p tests.pipeline.shuffled``: the tests in an order drawn anew, whose seed is printed.

``KL_TERM_SHUFFLE=SEED`` draws that order again.
"""

from __future__ import annotations

import os
import random

import pytest

SEED = int(os.environ.get("KL_TERM_SHUFFLE") or random.SystemRandom().randrange(10**6))


def pytest_report_header() -> str:
    return f"order: KL_TERM_SHUFFLE={SEED}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    random.Random(SEED).shuffle(items)
