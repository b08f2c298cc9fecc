"""The page that defines every metric a training run logs, written from the trainer's own list."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.training.metrics import POLICY_METRICS, WINDOW_METRICS

_INTRODUCTION = """\
# Metrics of a training run

Every column of the curves in `results/`, by the name it has there. One value per run and logging
window. Within an update a metric is the mean over its optimizer steps and over counted tokens. KLs,
estimators and entropy are in nats per token. {doc}`/book/notation` defines the symbols.
"""
_WINDOW = "## Averaged over the updates of a window\n"
_POLICY = """\
## Measured at the first update of a window

They need the whole vocabulary or the reference. `kl_cosine` needs two more gradients: it is
measured every `cosine_every` updates, on the first optimizer step, and is empty in between, without
a KL term and while the policy is the reference.
"""


def glossary_page() -> str:
    """The glossary as MyST text."""
    return "\n".join(
        [_INTRODUCTION, _WINDOW, _table(WINDOW_METRICS), _POLICY, _table(POLICY_METRICS)]
    )


def _table(metrics: Mapping[str, str]) -> str:
    rows = [f"| `{name}` | {definition} |" for name, definition in metrics.items()]
    return "\n".join(["| Metric | Definition |", "|---|---|", *rows, ""])
