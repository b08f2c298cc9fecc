"""TRL's GRPO trainer with any KL term: needs ``pip install 'kl-term[trl]'``."""

from __future__ import annotations

try:
    import trl as _  # noqa: F401
except ImportError:
    raise ImportError(
        "analysis.integrations.trl needs TRL, which is not installed: pip install 'kl-term[trl]'"
    ) from None

from analysis.integrations.trl.trainer import KLGRPOTrainer
from analysis.kl.term import KLTerm

__all__ = ["KLGRPOTrainer", "KLTerm"]
