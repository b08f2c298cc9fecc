"""``kl-term COMMAND``: what users ask of their loss and their run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

try:
    import importlib

    importlib.import_module("typing").TYPE_CHECKING  # noqa: B018 - is it Python's own?
except (ImportError, AttributeError) as error:
    path = os.environ.get("PYTHONPATH", "")
    sys.exit(f"kl-term: {error}: unset PYTHONPATH={path}, which hides Python's own modules")

from kl_term import __version__
from kl_term.cli.program import Program, run_program

PROGRAM = Program(
    name="kl-term",
    version=__version__,
    package="kl_term.cli",
    commands={
        "audit": "say what a loss minimises, exactly, and what is wrong with it",
        "diagnose": "say what is wrong with the KL term of a run, from its log-probs",
    },
    extras={"audit": "audit", "diagnose": "diagnose"},
    install="pip install 'kl-term[{extra}]'",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    return run_program(PROGRAM, argv)
