"""What a kind of fault did."""

from __future__ import annotations

import sys
from typing import NamedTuple


class Outcome(NamedTuple):
    """Faults of one kind."""

    fault: str
    tried: int
    #: Finished results that are gone or changed.
    lost: int
    #: Faults that nothing noticed, or that left something wrong.
    silent: int
    #: Updates computed over those an undisturbed sweep computes, where faults cost some.
    compute: float = float("nan")


def say(text: str) -> None:
    """How far it is."""
    print(text, file=sys.stderr, flush=True)
