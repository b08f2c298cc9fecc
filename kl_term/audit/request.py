"""What one asks of an audit from outside, and what comes back; without torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kl_term.audit.names import Level, Samples
from kl_term.schema import Schema


class Request(Schema):
    """An audit of a function by its name, and the expectations that must hold."""

    target: str  #: ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``
    names: dict[str, str] = Field(default_factory=dict)
    beta_name: str | None = None
    beta: float = 1.0
    factory: bool = False
    kind: Literal["loss", "reward"] | None = None
    expect: str | None = None
    samples: Samples = "fresh"
    stale_too: bool = False  #: expected on stale samples beside them
    level: Level = "state"
    term: str | None = None
    aggregation: str | None = None
    fail_on: tuple[str, ...] = ("error", "warning")


class Answer(Schema):
    """What came of a request."""

    text: str = ""
    report: dict[str, Any] = Field(default_factory=dict)
    page: str = ""
    failed: tuple[str, ...] = ()  #: one line an expectation or finding that fails
    refusal: str = ""  #: one line; nothing else is set then
