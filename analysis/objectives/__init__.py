"""Objectives: from rewards to advantages, and from log-probs and advantages to a loss."""

from __future__ import annotations

from importlib import import_module
from typing import Any

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
