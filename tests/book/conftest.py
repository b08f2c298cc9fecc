"""The built book under test: ``_build/html``, or the folder that ``KL_TERM_BOOK`` names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HTML = Path(os.environ.get("KL_TERM_BOOK", ROOT / "_build/html")).resolve()


@pytest.fixture(scope="session")
def html() -> Path:
    if not (HTML / "book/index.html").exists():
        pytest.skip(f"{HTML}: no built book; run make book")
    return HTML
