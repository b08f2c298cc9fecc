"""What users take into their own trainer: KL terms, objectives, the diagnosis of a run.

Every public name of :mod:`kl_term.kl` and :mod:`kl_term.objectives` is here too, loaded when asked
for::

    from kl_term import KLTerm, kl_loss, kl_penalty, policy_loss, reverse_kl
"""

from __future__ import annotations

from typing import Any

from kl_term import kl, objectives

__version__ = "0.1.0"
_HOMES = {name: package for package in (kl, objectives) for name in package.__all__}
__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_HOMES[name], name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
