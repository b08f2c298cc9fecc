"""The built book under test: ``_build/html``, or the folder that ``KL_TERM_BOOK`` names.

Without one its tests are skipped, and fail where ``KL_TERM_GATE`` is set, as ``.ci/run`` does.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HTML = Path(os.environ.get("KL_TERM_BOOK", ROOT / "_build/html")).resolve()


@pytest.fixture(scope="session")
def html() -> Path:
    if not (HTML / "book/index.html").exists():
        refuse = pytest.fail if os.environ.get("KL_TERM_GATE") else pytest.skip
        refuse(f"{HTML}: no built book; run make book")
    return HTML
