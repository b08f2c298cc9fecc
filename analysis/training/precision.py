"""The precision in which a run is computed."""

from __future__ import annotations

import torch

from analysis.records.config import RunConfig


def dtype_of(config: RunConfig) -> torch.dtype:
    """Of a run's weights, log-probs and gradients."""
    return {"float32": torch.float32, "float64": torch.float64}[config.precision]
