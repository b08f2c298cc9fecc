"""Floor 1: what GRPO and its relatives optimise beside the KL: advantages, losses, preferences."""

from analysis.objectives.advantages import (
    group_centre,
    group_normalise,
    leave_one_out,
    process_supervision,
)
from analysis.objectives.losses import policy_loss
from analysis.objectives.preference import dpo_loss

__all__ = [
    "dpo_loss",
    "group_centre",
    "group_normalise",
    "leave_one_out",
    "policy_loss",
    "process_supervision",
]
