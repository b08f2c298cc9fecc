"""The KL term of GRPO and RLHF: exact estimators, objectives, training, and the book about them."""

from __future__ import annotations

__version__ = "0.1.0"
