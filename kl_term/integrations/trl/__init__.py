"""TRL's GRPO trainer with any KL term: needs ``pip install 'kl-term[trl]'``."""

from __future__ import annotations

try:
    import trl as _  # noqa: F401
except ImportError:
    raise ImportError(
        "kl_term.integrations.trl needs TRL, which is not installed: pip install 'kl-term[trl]'"
    ) from None

from kl_term.diagnosis.dumping import Dump
from kl_term.integrations.trl.callback import DiagnosisCallback
from kl_term.integrations.trl.target import TargetKL
from kl_term.integrations.trl.trainer import KLGRPOTrainer
from kl_term.kl.term import KLTerm

__all__ = ["DiagnosisCallback", "Dump", "KLGRPOTrainer", "KLTerm", "TargetKL"]
