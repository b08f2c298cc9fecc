"""Which KL term and aggregation a loss is, sample by sample, out of all that there are.

Every estimator, placement, weighting, ratio, level, credit and shown value, under every
aggregation, on batches of answers of several lengths: value and gradient must agree up to one
factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kl_term.audit.batches import Batch, chosen
from kl_term.audit.prices import BASELINES, OF_ANSWERS, SURROGATES, Seen, Terms, priced
from kl_term.audit.readings import Part
from kl_term.checks import trusted
from kl_term.kl.estimators import ESTIMATORS, TOKEN_ESTIMATORS
from kl_term.kl.names import CREDITS, RATIO_LEVELS
from kl_term.kl.term import KLTerm
from kl_term.objectives.aggregation import MODES


class Candidate(NamedTuple):
    """A term and how it is written as a loss."""

    term: KLTerm
    per_token: Terms
    written: str  #: ``loss``, or the surrogate of a reward


class Match(NamedTuple):
    """A term and an aggregation that agree with a loss."""

    term: KLTerm
    aggregation: str | None  #: None where the loss returned tokens, or for none of ours
    scale: float  #: of the gradient
    error: float  #: relative, of the gradient
    value_scale: float | None  #: of the value; None where it is the value of no estimator
    written: str

    @property
    def name(self) -> str:
        return self.term.name


@cache
def terms(by_logits: bool) -> tuple[Candidate, ...]:
    """All of them, the plainest first; none twice (k4 is k3)."""
    found = [Candidate(term, _loss(term), "loss") for term in _losses(by_logits)]
    for term, (written, surrogate) in itertools.product(_rewards(), SURROGATES.items()):
        if written == OF_ANSWERS and term.credit != "whole":
            continue
        found.append(Candidate(term, priced(term, surrogate), written))
        if term.level == "sequence" or term.credit == "whole":
            found += [
                Candidate(term, priced(term, surrogate, off), f"{written}, less {name}")
                for name, off in BASELINES.items()
            ]
    return tuple(found)


def _losses(by_logits: bool) -> Iterator[KLTerm]:
    names = [name for name in TOKEN_ESTIMATORS if name != "k4"]
    for name in names:
        yield _term(estimator=name)
    if by_logits:
        yield from (_term(estimator=name) for name in ("exact", "forward"))
    for name, weighting in itertools.product(names, ("none", "attached", "detached")):
        if name in ESTIMATORS:
            yield _term(estimator=name, weighting=weighting, level="sequence")
    for name, weighting, ratio in itertools.product(names, ("attached", "detached"), RATIO_LEVELS):
        if name in ESTIMATORS or weighting == "detached":
            yield _term(estimator=name, weighting=weighting, ratio=ratio)
    yield _term(estimator="cross_entropy")


def _rewards() -> Iterator[KLTerm]:
    for name in (name for name in ESTIMATORS if name != "k4"):
        for credit in ("immediate", *(c for c in CREDITS if c != "immediate")):
            yield _term(estimator=name, placement="reward", credit=credit)
        if name != "k1":  # of which the whole completion's is the sum of the tokens'
            yield _term(estimator=name, placement="reward", level="sequence")


def _term(**fields: Any) -> KLTerm:
    """Checked as it is made: the fields come out of tables of names."""
    return KLTerm(**fields)


def _loss(term: KLTerm) -> Terms:
    def per_token(seen: Seen) -> Tensor:
        vocabulary = {"logits": seen.logits, "ref_logits": seen.ref_logits}
        read = vocabulary if term.reads_logits else {}
        return term.loss(seen.logp, seen.ref_logp, old_logp=seen.old_logp, mask=seen.mask, **read)

    return per_token


#: No aggregation of ours, and often met: all tokens of a batch are added up.
SUM = "sum"


def weights_of(counted: Tensor, aggregation: str | None) -> Tensor:
    if aggregation == SUM:
        return counted
    return counted / len(counted) if aggregation is None else MODES[aggregation](counted)


class Probes:
    """Batches, what a loss gives on them, and every candidate beside it."""

    def __init__(
        self,
        batches: Sequence[Batch],
        parts: Sequence[Part],
        *,
        by_logits: bool,
        other: Probes | None = None,
    ) -> None:
        self.other = other  #: of another shape: only there a width and a number show
        self.batches, self.parts, self.by_logits = list(batches), list(parts), by_logits
        self.wanted = torch.cat([p.gradient.flatten() for p in parts])
        self.values = torch.cat([p.value.flatten() for p in parts])
        self._kept: dict[tuple[KLTerm, str], tuple[Tensor, Tensor]] = {}

    @property
    def returns_tokens(self) -> bool:
        return self.parts[0].value.ndim == 2

    @property
    def aggregations(self) -> tuple[str | None, ...]:
        if self.returns_tokens:
            return (None,)
        if self.parts[0].value.ndim == 1:
            return ("seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
        return (*MODES, SUM)

    @cached_property
    def weights(self) -> Tensor:
        """[probes, aggregations, B, T]."""
        found = []
        for batch in self.batches:
            counted = batch.mask.double()
            modes = [weights_of(counted, name) for name in self.aggregations]
            found.append(torch.stack(modes))
        return torch.stack(found)

    def of(self, candidate: Candidate) -> tuple[Tensor, Tensor]:
        """Gradients [aggregations, D] and values [aggregations, E] of a candidate."""
        key = (candidate.term, candidate.written)
        if key not in self._kept:
            self._kept[key] = self._computed(candidate)
        return self._kept[key]

    @cached_property
    def _stacked(self) -> dict[str, Tensor]:
        """[probes, aggregations, B, T, ...]: the fields of the batches, once for all candidates."""
        found = {}
        for name in (*Seen._fields, "tokens"):
            x = torch.stack([getattr(b, name) for b in self.batches]).unsqueeze(1)
            found[name] = x.expand(-1, len(self.aggregations), *x.shape[2:])
        return found

    def _computed(self, candidate: Candidate) -> tuple[Tensor, Tensor]:
        weights, stacked = self.weights, self._stacked
        mask = stacked["mask"]
        with torch.enable_grad(), trusted():
            name = "logits" if self.by_logits else "logp"
            leaf = stacked[name].detach().clone().requires_grad_(True)
            logp = chosen(leaf, stacked["tokens"]) if self.by_logits else leaf
            fields = {of: stacked[of] for of in Seen._fields} | {"logp": logp, name: leaf}
            seen = Seen(**fields | {"logp": logp})
            per_token = candidate.per_token(seen)
            weighted = torch.where(mask, per_token, 0.0) * weights
            (gradient,) = torch.autograd.grad(weighted.sum(), leaf)
        values = torch.where(mask, per_token, 0.0).detach()
        if not self.returns_tokens:
            of_rows = (values * weights).sum(-1)
            one = self.parts[0].value.ndim == 0
            values = of_rows.sum(-1) if one else of_rows * mask.shape[-2]
        # probes last: what belongs to one aggregation is one row
        return gradient.transpose(0, 1).flatten(1), values.transpose(0, 1).flatten(1)


def matches(
    probes: Probes, tolerance: float, among: Sequence[Candidate] | None = None
) -> list[Match]:
    """Every candidate with the gradient of the loss, those with its value first."""
    found = []
    for candidate in terms(probes.by_logits) if among is None else among:
        gradients, values = probes.of(candidate)
        for index, aggregation in enumerate(probes.aggregations):
            scale, error = fit(probes.wanted, gradients[index])
            if error <= tolerance and _holds(probes.other, candidate, index, scale, tolerance):
                value_scale = _value_scale(probes, values[index], scale, tolerance)
                found.append(
                    Match(candidate.term, aggregation, scale, error, value_scale, candidate.written)
                )
    return sorted(found, key=lambda m: (m.value_scale is None, m.written != "loss", m.scale < 0))


def _holds(
    other: Probes | None, candidate: Candidate, index: int, scale: float, tolerance: float
) -> bool:
    """Whether the same factor holds for batches of another shape."""
    if other is None:
        return True
    found, error = fit(other.wanted, other.of(candidate)[0][index])
    return error <= tolerance and abs(found - scale) <= 10 * tolerance * abs(scale) + 1e-12


def best_match(probes: Probes, tolerance: float) -> Match | None:
    """The term that a loss is, with the value that it shows; None if it is none of ours."""
    if bool((probes.wanted.abs() <= 1e-12).all()):
        return None
    found = matches(probes, tolerance)
    if not found:
        return None
    first = found[0]
    if first.value_scale is not None:
        return first
    for match in (m for m in found if m.term.estimator in ESTIMATORS and m.written == "loss"):
        for shown in (name for name in ESTIMATORS if name not in ("k4", match.term.estimator)):
            term = KLTerm(**(match.term.model_dump() | {"value": shown}))
            (candidate,) = (
                c for c in terms(probes.by_logits)
                if c.term == KLTerm(**(match.term.model_dump() | {"estimator": shown}))
            )  # fmt: skip
            values = probes.of(candidate)[1][probes.aggregations.index(match.aggregation)]
            scale = _value_scale(probes, values, match.scale, tolerance)
            if scale is not None:
                return match._replace(term=term, value_scale=scale)
    return first


def nearest(probes: Probes) -> Match | None:
    """The candidate with the smallest error, for the reader of a verdict ``none of ours``."""
    best: Match | None = None
    for candidate in terms(probes.by_logits):
        gradients, _ = probes.of(candidate)
        for index, aggregation in enumerate(probes.aggregations):
            scale, error = fit(probes.wanted, gradients[index])
            if best is None or error < best.error:
                best = Match(candidate.term, aggregation, scale, error, None, candidate.written)
    return best


def value_alone(probes: Probes, tolerance: float) -> Match | None:
    """The term whose value a loss has, whatever its gradient."""
    for candidate in terms(probes.by_logits):
        if candidate.written != "loss":
            continue
        _, values = probes.of(candidate)
        for index, aggregation in enumerate(probes.aggregations):
            scale, error = fit(probes.values, values[index])
            if error <= tolerance:
                return Match(candidate.term, aggregation, 0.0, error, scale, "loss")
    return None


def _value_scale(probes: Probes, values: Tensor, scale: float, tolerance: float) -> float | None:
    found, error = fit(probes.values, values)
    return (
        found if error <= tolerance and abs(found - scale) <= 1e3 * tolerance * abs(scale) else None
    )


def fit(wanted: Tensor, candidate: Tensor) -> tuple[float, float]:
    """The factor, and the relative error that it leaves."""
    size = candidate @ candidate
    if not bool(size > 0) or not bool(wanted.norm() > 0):
        return 0.0, float("inf")
    scale = (wanted @ candidate) / size
    return scale.item(), ((wanted - scale * candidate).norm() / wanted.norm()).item()
