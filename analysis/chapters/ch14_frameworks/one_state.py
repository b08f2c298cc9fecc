"""What is asked about a trainer at one state; no other module of the trainers calls the audit.

Which of our terms a setting is, is found by its gradient, never entered.
"""

from __future__ import annotations

from itertools import product

from analysis.chapters.ch14_frameworks.trainers.registry import Option
from analysis.evidence.policies import SAME
from kl_term.audit.states import States, mean_gradient
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
