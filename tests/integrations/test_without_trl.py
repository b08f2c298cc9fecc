"""What the integrations import, and what is said where TRL is not installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ASKED = """
import json, sys
import kl_term.integrations.measurements
found = {"below": "trl" in sys.modules}
import kl_term.integrations.verl
found["verl"] = "verl" in sys.modules
sys.modules["trl"] = None
try:
    import kl_term.integrations.trl
except ImportError as error:
    found["said"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, bool | str]:
    """As a new process, which has imported nothing else, finds it."""
    ran = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def test_one_line_names_the_extra(found):
    assert found["said"].splitlines() == [
        "kl_term.integrations.trl needs TRL, which is not installed: pip install 'kl-term[trl]'"
    ]


def test_nothing_below_imports_trl(found):
    assert found["below"] is False


def test_verl_is_imported_by_a_call_only(found):
    assert found["verl"] is False
