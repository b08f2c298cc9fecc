"""Where TRL is not installed, one line says what to install."""

from __future__ import annotations

import subprocess
import sys

HIDDEN = """
import sys
sys.modules["trl"] = None
try:
    import kl_term.integrations.trl
except ImportError as error:
    print(error)
"""


def test_one_line_names_the_extra():
    ran = subprocess.run([sys.executable, "-c", HIDDEN], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [
        "kl_term.integrations.trl needs TRL, which is not installed: pip install 'kl-term[trl]'"
    ]


def test_nothing_below_imports_trl():
    code = "import sys, kl_term.integrations.measurements; sys.exit('trl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
