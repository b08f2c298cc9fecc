"""On whose samples, and of what, an expected gradient is."""

from __future__ import annotations

from typing import Literal

Samples = Literal["fresh", "stale"]
Level = Literal["state", "sequence"]
