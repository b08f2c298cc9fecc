"""``kl-term audit`` and ``pytest --kl-audit``, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TRAINER = '''
"""A trainer's loss."""
import os, sys, time
print("printed at import")
HOW = os.environ.get("HOW", "")
if HOW == "raises":
    raise RuntimeError("no GPU")
if HOW == "exits":
    sys.exit(3)
if HOW == "forks":
    os.fork()
if HOW == "dies":
    os.abort()
if HOW == "hangs":
    time.sleep(1000)


def right(logp, ref_logp, mask, kl_coef):
    kl = 0.5 * (logp - ref_logp) ** 2
    return kl_coef * kl.where(mask, 0.0).sum() / mask.sum()


def wrong(logp, ref_logp, mask, kl_coef):
    return -right(logp, ref_logp, mask, kl_coef)
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_trainer.py").write_text(TRAINER)
    return tmp_path


def run(folder, *arguments, how="", module="kl_term"):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOW": how}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_right_loss_passes_and_a_wrong_one_fails_with_status_1(folder):
    options = ("--expect", "reverse KL", "--json", "out.json", "--page", "audit.html")
    found = run(folder, "audit", "my_trainer.py:right", "--beta-name", "kl_coef", *options)
    assert found.returncode == 0, found.stderr
    assert "printed" not in found.stdout
    report = json.loads((folder / "out.json").read_text())
    assert set(report) == {"term", "aggregation", "scale", "minimises", "findings"}
    assert (report["term"], report["aggregation"], report["scale"]) == ("k2_loss", "token_mean", 1)
    assert report["minimises"]["fresh"] == {"state": "reverse KL", "sequence": "neither"}
    for finding in report["findings"]:
        assert set(finding) == {"code", "severity", "says", "advice", "theorem"}
    assert "k2_loss under token_mean" in (folder / "audit.html").read_text()
    found = run(folder, "audit", "my_trainer.py:wrong", "--expect", "reverse KL", "--stale")
    assert found.returncode == 1
    assert "fails: minimises minus reverse KL on fresh samples at a state" in found.stdout
    assert "fails: minimises neither on stale samples at a state" in found.stdout
    assert "fails: error sign" in found.stdout


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", "fails to import: RuntimeError: no GPU"),
        ("exits", "fails to import: SystemExit: 3"),
        ("forks", "forks while it is imported"),
        ("dies", "was ended by SIGABRT before there was a result"),
        ("hangs", "did not return within 15 seconds"),
    ],
)
def test_whatever_a_file_does_ends_in_one_line(folder, how, says):
    seconds = "15" if how == "hangs" else "200"
    found = run(folder, "audit", "my_trainer.py:right", "--seconds", seconds, how=how)
    assert found.returncode == 1
    assert says in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert found.stdout == ""


def test_what_is_not_there_is_named(folder):
    assert "there is no such file" in run(folder, "audit", "nowhere.py:loss").stderr
    assert "has no 'lost'; it has" in run(folder, "audit", "my_trainer.py:lost").stderr


def test_the_plugin_is_one_test_a_property_and_off_unless_used(folder):
    (folder / "test_mine.py").write_text(
        "from my_trainer import right\n"
        "def test_it(kl_audit):\n"
        "    assert kl_audit(right).minimises['fresh']['state'] == 'reverse KL'\n"
    )
    plugin = ("-p", "no:cacheprovider", "-q")
    plain = run(folder, *plugin, module="pytest")
    assert "1 passed" in plain.stdout, plain.stdout
    used = run(folder, *plugin, "--kl-audit", "my_trainer:wrong", "-v", module="pytest")
    assert "1 failed, 13 passed" in used.stdout  # its own test, and the other properties
    assert "FAILED my_trainer:wrong::the KL has the right sign" in used.stdout
    assert "the KL has the wrong sign" in used.stdout
