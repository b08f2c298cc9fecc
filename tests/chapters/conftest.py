"""Recordings turned round, to see verdicts change."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from analysis.evidence.recorded import recorded


@pytest.fixture
def negate(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str], None]:
    """Let the claims of a module read recordings in which a final metric has the other sign."""

    def turn(claims: ModuleType, metric: str) -> None:
        def turned(preset: str):
            real = recorded(preset)
            return real._replace(finals=real.finals.assign(**{metric: -real.finals[metric]}))

        monkeypatch.setattr(claims, "recorded", turned)

    return turn
