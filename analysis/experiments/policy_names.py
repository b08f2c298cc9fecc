"""The policies that chapter 4 can train; apart, because a parameter is checked without torch."""

from __future__ import annotations

TINY = "tiny"
SMOLLM2 = "smollm2-135m"
POLICIES = (TINY, SMOLLM2)
