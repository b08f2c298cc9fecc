"""Objectives: from rewards to advantages, and from log-probs and advantages to a loss.

Arguments are checked as in :mod:`kl_term.kl`: *Raises* names what *Args* do not say.
"""

from __future__ import annotations

from kl_term.lazy import lookup

#: The public names and their modules; loaded when asked for.
_HOMES = {
    "dpo_loss": "preference",
    "group_centre": "advantages",
    "group_normalise": "advantages",
    "leave_one_out": "advantages",
    "policy_loss": "losses",
    "process_supervision": "advantages",
}
__all__ = list(_HOMES)
__getattr__ = lookup(__name__, _HOMES)
