"""CONTRIBUTING leads to files that are there, in few steps."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|md|yaml|yml|ipynb|toml))`")


def test_every_file_that_it_names_exists() -> None:
    named = set(FILE.findall(TEXT))
    assert len(named) > 25
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
