"""The page that defines every metric a training run logs, written from the trainer's own list."""

from __future__ import annotations

from analysis.report.generated import render
from analysis.training.metrics import POLICY_METRICS, WINDOW_METRICS


def glossary_page() -> str:
    """The glossary as MyST text."""
    return render("metrics.md", windows=WINDOW_METRICS, policies=POLICY_METRICS)
