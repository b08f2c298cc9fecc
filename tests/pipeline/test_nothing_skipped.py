"""In ``make test-full`` a skip is a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("reason", "status"), [("ray is not installed", 1), ("set FRAMEWORK_SOURCES to a folder", 0)]
)
def test_a_skip_fails_the_run_unless_no_index_has_what_is_missing(
    tmp_path: Path, reason: str, status: int
) -> None:
    path = tmp_path / "test_peer.py"
    path.write_text(f"import pytest\ndef test_peer(): pytest.skip({reason!r})\n")
    plugin = ("-p", "tests.pipeline.nothing_skipped")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, "-p", "no:cacheprovider", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout
    assert (reason in done.stdout.rpartition("nothing should be here")[2]) or not status
