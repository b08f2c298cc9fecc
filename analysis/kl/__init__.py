"""Floor 0: divergences, their sampled estimators, and exact enumeration of what these optimise.

Every function checks its arguments (``analysis.checks``) and raises a ``ValueError`` that names
the one with another shape, type or range than its docstring gives, or with an unknown name. Under
*Raises* stands what a docstring's *Args* do not say.
"""

from __future__ import annotations

from analysis.lazy import lookup

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
__getattr__ = lookup(__name__, _HOMES)
