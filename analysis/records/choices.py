"""What the parameters ``profile`` and ``policy`` of a notebook may be: checked without torch."""

from __future__ import annotations

PROFILES = ("quick", "full")
TINY = "tiny"
SMOLLM2 = "smollm2-135m"
POLICIES = (TINY, SMOLLM2)
