"""Which of our terms a setting is: found by its gradient, never entered."""

from __future__ import annotations

from itertools import product

from analysis.chapters.ch14_frameworks import States, mean_gradient
from analysis.chapters.frameworks.registry import Option
from analysis.chapters.policies import SAME
from kl_term.kl.enumeration import expected_gradient, relative_error
from kl_term.kl.term import KLTerm

TERMS = tuple(
    KLTerm(estimator=estimator, weighting=weighting)
    for estimator, weighting in product(("k1", "k2", "k3"), ("none", "detached", "attached"))
)


def term_of(option: Option, at: States) -> KLTerm | None:
    """The term in the loss with the same mean gradient on stale samples, where no clamp binds."""
    gradient = mean_gradient(option.loss, at)
    for term in TERMS:
        same = expected_gradient(*at, **term.at_one_state)
        if (relative_error(gradient, same) < SAME).all():
            return term
    return None
