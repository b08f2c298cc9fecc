"""Faults as hypotheses: with the arguments of a known term mixed up in a known way, is it that?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kl_term.audit.candidates import Candidate, Seen, Terms
from kl_term.kl.estimators import ESTIMATORS
from kl_term.kl.term import KLTerm

#: In the order in which they are tried. An exchanged k1 or k2 is a sign or nothing.
FAULTS = (
    "exchanged",
    "score-term",
    "kl-ratio-to-reference",
    "to-the-sampler",
    "shifted-reference",
    "pointwise-kl-div",
    "absolute",
    "positive-part",
)


def faulty(code: str) -> Iterator[Candidate]:
    """The terms that a loss with this fault is one of."""
    yield from _MAKERS[code]()


def _term(**fields: Any) -> KLTerm:
    """Checked as it is made: the fields come out of tables of names."""
    return KLTerm(**fields)


def _plain(term: KLTerm, change: Callable[[Seen], Seen]) -> Terms:
    """A term of tensors that are mixed up."""

    def per_token(seen: Seen) -> Tensor:
        seen = change(seen)
        return term.loss(seen.logp, seen.ref_logp, old_logp=seen.old_logp, mask=seen.mask)

    return per_token


def _estimators() -> tuple[str, ...]:
    return tuple(name for name in ESTIMATORS if name not in ("k4", "k3_clip"))


def _exchanged() -> Iterator[Candidate]:
    for name in _estimators():
        value = ESTIMATORS[name]
        for weighting in ("none", "attached", "detached"):

            def swapped(seen: Seen, value: Callable = value, weighting: str = weighting) -> Tensor:
                return _weight(seen, weighting) * value(seen.ref_logp, seen.logp)

            yield Candidate(_term(estimator=name, weighting=weighting), swapped, "exchanged")


def _weight(seen: Seen, weighting: str) -> Tensor:
    ratio = torch.where(seen.mask, seen.logp - seen.old_logp, 0.0).exp()
    return {"none": torch.ones_like(ratio), "attached": ratio, "detached": ratio.detach()}[
        weighting
    ]


def _score_terms() -> Iterator[Candidate]:
    for name in ("k1", "k2"):
        term = _term(estimator=name, weighting="attached")
        yield Candidate(
            term, _plain(term, lambda s: s._replace(old_logp=s.logp.detach())), "ratio to itself"
        )


def _ratio_to_reference() -> Iterator[Candidate]:
    for name in _estimators():
        for weighting in ("attached", "detached"):
            term = _term(estimator=name, weighting=weighting)
            yield Candidate(
                term,
                _plain(term, lambda s: s._replace(old_logp=s.ref_logp)),
                "ratio to the reference",
            )


def _to_the_sampler() -> Iterator[Candidate]:
    for name in _estimators():
        for weighting in ("none", "attached", "detached"):
            term = _term(estimator=name, weighting=weighting)
            if name != "k1" or weighting == "attached":  # else it is k1 to anything
                yield Candidate(
                    term, _plain(term, lambda s: s._replace(ref_logp=s.old_logp)), "to the sampler"
                )


def _shifted() -> Iterator[Candidate]:
    for name in ("k2", "k3"):
        for by in (1, -1):
            term = _term(estimator=name)
            yield Candidate(term, _plain(term, _rolled(by)), "reference shifted by a token")


def _rolled(by: int) -> Callable[[Seen], Seen]:
    return lambda s: s._replace(ref_logp=s.ref_logp.roll(by, -1))


def _pointwise() -> Iterator[Candidate]:
    term = KLTerm(estimator="k1")
    yield Candidate(term, lambda s: s.ref_logp.exp() * (s.ref_logp - s.logp), "kl_div(logp, ref)")
    yield Candidate(term, lambda s: s.logp.exp() * (s.logp - s.ref_logp), "kl_div(ref, logp)")


def _weighed(weighting: str, of: Callable[[Tensor], Tensor]) -> Terms:
    return lambda s: _weight(s, weighting) * of(s.logp - s.ref_logp)


def _absolute() -> Iterator[Candidate]:
    term = KLTerm(estimator="k1")
    for weighting in ("none", "attached", "detached"):
        yield Candidate(term, _weighed(weighting, Tensor.abs), "absolute log-ratio")


def _positive() -> Iterator[Candidate]:
    term = KLTerm(estimator="k1")
    for weighting in ("none", "attached", "detached"):
        yield Candidate(term, _weighed(weighting, Tensor.relu), "positive part")


_MAKERS: dict[str, Callable[[], Iterator[Candidate]]] = dict(
    zip(
        FAULTS,
        (
            _exchanged,
            _score_terms,
            _ratio_to_reference,
            _to_the_sampler,
            _shifted,
            _pointwise,
            _absolute,
            _positive,
        ),
        strict=True,
    )
)
