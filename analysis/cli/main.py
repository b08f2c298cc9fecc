"""``analysis COMMAND``: the notebooks, the sweeps, the ledger and the book."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

try:
    import importlib

    importlib.import_module("typing").TYPE_CHECKING  # noqa: B018 - is it Python's own?
except (ImportError, AttributeError) as error:
    path = os.environ.get("PYTHONPATH", "")
    sys.exit(f"analysis: {error}: unset PYTHONPATH={path}, which hides Python's own modules")

from kl_term import __version__
from kl_term.cli.program import Program, run_program

PROGRAM = Program(
    name="analysis",
    version=__version__,
    package="analysis.cli",
    commands={
        "run": "execute the notebooks whose inputs changed",
        "sweep": "train the runs of a population that are not stored yet",
        "reproduce": "train recorded runs again and compare every digit",
        "claims": "recompute the ledger and refuse any disagreement",
        "check": "in seconds, whether results, runs, stored outputs and claims agree",
        "build": "check the executed notebooks and build the book from them",
        "translate": "bring the catalogues of other languages up to date",
        "refresh": "copy the executed notebooks back over the committed ones",
    },
    extras={
        **dict.fromkeys(("run", "claims", "check", "build", "translate", "refresh"), "book"),
        **dict.fromkeys(("sweep", "reproduce"), "ray"),
    },
    install="pip install -e '.[{extra}]'",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    return run_program(PROGRAM, argv)
