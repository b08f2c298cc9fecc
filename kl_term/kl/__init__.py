"""Divergences, their sampled estimators, and exact enumeration of what these optimise.

Every function checks its arguments (``kl_term.checks``) and raises a ``ValueError`` that names
the one with another shape, type or range than its docstring gives, or with an unknown name. Under
*Raises* stands what a docstring's *Args* do not say.
"""

from __future__ import annotations

from typing import Any, get_args

from kl_term.kl.names import Value
from kl_term.lazy import lookup

#: The public names beside the estimators' and their modules; loaded when asked for, so that a run
#: loads what it needs.
_HOMES = {
    "KLTerm": "term",
    "chi_square": "divergences",
    "entropy": "divergences",
    "forward_kl": "divergences",
    "kl_loss": "surrogates",
    "kl_penalty": "surrogates",
    "moments": "gaussians",
    "reverse_kl": "divergences",
    "support_divergence": "top_k",
    "top_k_divergence": "top_k",
    "sequence_ids": "packing",
}
__all__ = sorted([*_HOMES, *get_args(Value)])
_of_homes = lookup(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    if name not in get_args(Value):  # which are names of estimators
        return _of_homes(name)
    from kl_term.kl.estimators import ESTIMATORS

    return ESTIMATORS[name]
