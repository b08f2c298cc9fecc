"""TRL's GRPO trainer with any KL term: needs ``pip install -e '.[trl]'``."""

from __future__ import annotations

try:
    import trl as _  # noqa: F401
except ImportError:
    raise ImportError(
        "analysis.integrations.trl needs TRL, which is not installed: pip install -e '.[trl]'"
    ) from None

from analysis.diagnosis.dumping import Dump
from analysis.integrations.trl.callback import DiagnosisCallback
from analysis.integrations.trl.target import TargetKL
from analysis.integrations.trl.trainer import KLGRPOTrainer
from analysis.kl.term import KLTerm

__all__ = ["DiagnosisCallback", "Dump", "KLGRPOTrainer", "KLTerm", "TargetKL"]
