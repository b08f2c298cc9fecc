from __future__ import annotations

import re

from analysis.report.build import book_generators
from analysis.report.glossary import glossary_page
from analysis.training.metrics import METRICS


def test_the_glossary_defines_every_metric_once():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", glossary_page(), re.MULTILINE)
    assert dict(rows) == METRICS
    assert len(rows) == len(METRICS)
    assert all("|" not in definition for definition in METRICS.values())


def test_the_book_is_built_with_the_glossary():
    assert "metrics.md" in book_generators()
