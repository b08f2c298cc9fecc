"""Pages that are written from the code: what they must hold."""

from __future__ import annotations

import re

from analysis.records.metrics import (
    COEFFICIENT_METRICS,
    CONTROL_METRICS,
    ENSEMBLE_METRICS,
    METRICS,
    PROXY_METRICS,
)
from analysis.report.generated_pages import glossary_page


def test_the_glossary_defines_every_metric_once():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", glossary_page(), re.MULTILINE)
    known = METRICS | PROXY_METRICS | ENSEMBLE_METRICS | COEFFICIENT_METRICS | CONTROL_METRICS
    assert dict(rows) == known
    assert len(rows) == len(known)
    assert all("|" not in definition for definition in known.values())
