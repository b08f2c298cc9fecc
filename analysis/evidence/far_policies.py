"""Errors of an estimator's gradient at policies far from their references, fresh and stale."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from analysis.evidence.claims import largest, median
from analysis.evidence.policies import moved_logits, pairs, random_tables
from kl_term.kl.enumeration import exact_kl_gradient, expected_gradient, relative_error
from kl_term.kl.sequences import Sequences, enumerate_sequences


@cache
def stale() -> Tensor:
    """For each policy an older one that sampled."""
    return moved_logits(pairs().logits, 0.7, seed=5)


def error_to(direction: str, estimator: str, old: Tensor | None = None, **variant: str) -> Tensor:
    """[300]: relative error of a variant's expected gradient against an exact KL gradient."""
    gradient = expected_gradient(*pairs(), old, estimator=estimator, **variant)
    return relative_error(gradient, exact_kl_gradient(*pairs(), direction=direction))


def worst(estimator: str, *sampler: Tensor, of: str = "reverse", **variant: str) -> float:
    """The largest :func:`error_to` a KL gradient: rounding, where the two are the same."""
    return largest(error_to(of, estimator, *sampler, **variant))


def typical(estimator: str, *sampler: Tensor, of: str = "reverse", **variant: str) -> float:
    """The median :func:`error_to` a KL gradient."""
    return median(error_to(of, estimator, *sampler, **variant))


@cache
def ragged() -> tuple[Sequences, Tensor, Tensor, Tensor]:
    """Sequences of up to three tokens with an end token; policy, reference and older policy."""
    sequences = enumerate_sequences(3, 3, eos=2)
    (table, step), (reference, _) = random_tables(sequences, 3, 2, spread=1.0, seed=6)
    return sequences, table, reference, table + 0.5 * step
