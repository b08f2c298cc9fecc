"""Floor 0: divergences, their sampled estimators, and exact enumeration of what these optimise."""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: The public names and their modules; loaded when asked for, so that a run loads what it needs.
_HOMES = {
    "KLTerm": "term",
    "chi_square": "divergences",
    "entropy": "divergences",
    "forward_kl": "divergences",
    "k1": "estimators",
    "k2": "estimators",
    "k3": "estimators",
    "k3_clip": "estimators",
    "k4": "estimators",
    "kl_loss": "surrogates",
    "kl_penalty": "surrogates",
    "moments": "gaussians",
    "reverse_kl": "divergences",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
