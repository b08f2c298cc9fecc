"""Which KL term and aggregation a loss is, sample by sample, or which fault makes it one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kl_term.audit.batches import Batch, random_batch
from kl_term.audit.candidates import (
    SUM,
    Match,
    Probes,
    best_match,
    fit,
    matches,
    nearest,
    terms,
    value_alone,
    weights_of,
)
from kl_term.audit.faults import FAULTS, faulty
from kl_term.audit.readings import Reading
from kl_term.kl.term import KLTerm

#: Standard deviation of the log-ratio to the reference: beyond where clamps bind, and within.
FAR, NEAR = 1.4, 0.2
#: Beyond the cap on the ratio of k3_clip.
BEYOND = 3.0


@dataclass(frozen=True)
class Identity:
    """What a KL is, sample by sample."""

    has_gradient: bool
    match: Match | None = None  #: the term with its gradient; with its value too if it has a scale
    only_near: bool = False  #: the match ends where policy and reference are far apart
    value_of: Match | None = None  #: the term with its value, whatever the gradient
    fault: str | None = None  #: of :data:`kl_term.audit.faults.FAULTS`, and what it then is
    under_fault: Match | None = None
    twice: tuple[Match, Match] | None = None  #: a term of the loss beside one of the reward
    nearest: Match | None = None
    aggregation: str | None = None
    weights_known: bool = True  #: the weights of tokens are those of an aggregation of ours
    divided: bool = False  #: the price of an answer in the reward is divided by its length

    @property
    def has_baseline(self) -> bool:
        """Whether a mean over the group is taken off the price of an answer."""
        return self.match is not None and ", less " in self.match.written

    @property
    def term(self) -> KLTerm | None:
        """Only what agrees in value and gradient, far from the reference too.

        The value may be that of an estimator without the weight of the gradient.
        """
        if self.match is None or self.only_near or self.divided:
            return None
        shown = self.value_of
        plain = shown is not None and shown.value_scale is not None and (
            shown.term.weighting == "none"
            and abs(shown.value_scale - self.match.scale) < 1e-3 * abs(self.match.scale)
        )  # fmt: skip
        return self.match.term if self.match.value_scale is not None or plain else None


def probe_batches(
    reading: Reading, distance: float, *, count: int = 6, rows: int = 3, width: int = 4
) -> list[Batch]:
    """Batches on which value and gradient are compared."""
    return [
        random_batch(
            rows=rows,
            width=width,
            vocab_size=5,
            distance=distance,
            staleness=0.06,
            ragged=reading.ragged,
            seed=100 + seed,
        )
        for seed in range(count)
    ]


def _probes(reading: Reading, distance: float) -> Probes:
    by_logits = reading.by_logits
    other = None
    if reading.shape != "tokens":
        batches = probe_batches(reading, distance, count=1, rows=5, width=6)
        other = Probes(batches, [reading.kl(b) for b in batches], by_logits=by_logits)
    batches = probe_batches(reading, distance)
    parts = [reading.kl(batch) for batch in batches]
    return Probes(batches, parts, by_logits=by_logits, other=other)


def identify(reading: Reading) -> Identity:
    """Search every term, then every fault, then sums of two."""
    far, near = _probes(reading, FAR), _probes(reading, NEAR)
    tolerance = reading.tolerance
    if not bool((near.wanted.abs() > 1e-12).any()):
        value = value_alone(near, tolerance)
        return Identity(False, value_of=value)
    found = Identity(True, match=_capped(reading, best_match(far, tolerance)))
    if found.match is None:
        near_match = best_match(near, tolerance)
        found = Identity(True, match=near_match, only_near=near_match is not None)
    if found.match is None:
        found = _under_a_fault(near, far, tolerance) or found
    if found.match is None and found.fault is None:
        found = replace(found, twice=_sum_of_two(far, tolerance), nearest=nearest(near))
    if reading.kind == "reward" and found.match is not None:  # the gradient is the price itself
        found = replace(found, match=found.match._replace(value_scale=found.match.scale))
    if found.match is None or found.match.value_scale is None:
        found = replace(found, value_of=value_alone(near, tolerance))
    return _with_aggregation(found, reading, near)


def _capped(reading: Reading, match: Match | None) -> Match | None:
    """k3 and k3 with a cap on its ratio part only beyond the cap."""
    if match is None or match.term.estimator != "k3" or match.value_scale is None:
        return match
    beyond = _probes(reading, BEYOND)
    for name in ("k3", "k3_clip"):
        term = match.term.model_copy(update={"estimator": name})
        same = tuple(c for c in terms(beyond.by_logits) if c.term == term)
        found = matches(beyond, reading.tolerance, same)
        if any(m.aggregation == match.aggregation for m in found):
            return match._replace(term=term)
    return match


def _under_a_fault(near: Probes, far: Probes, tolerance: float) -> Identity | None:
    for probes, only_near in ((far, False), (near, True)):
        for code in FAULTS:
            found = matches(probes, tolerance, tuple(faulty(code)))
            if found:
                return Identity(True, fault=code, under_fault=found[0], only_near=only_near)
    return None


def _sum_of_two(probes: Probes, tolerance: float) -> tuple[Match, Match] | None:
    """A term of the loss that does something, and one of the reward."""
    in_loss = [c for c in terms(probes.by_logits) if c.written == "loss"]
    in_loss = [c for c in in_loss if c.term.estimator not in ("k1", "cross_entropy", "k3_clip")
               or c.term.weighting == "attached"]  # fmt: skip
    in_reward = [c for c in terms(probes.by_logits) if c.term.placement == "reward"]
    wanted = probes.wanted
    for index, aggregation in enumerate(probes.aggregations):
        rewards = torch.stack([probes.of(c)[0][index] for c in in_reward])
        for one in in_loss:
            first = probes.of(one)[0][index]
            left = wanted - _along(first, wanted)
            beside = rewards - _along(first, rewards)
            size = beside.square().sum(-1)
            scale = (beside @ left) / size.clamp(min=1e-300)
            error = (left - scale.unsqueeze(-1) * beside).norm(dim=-1) / wanted.norm()
            error = torch.where(size > 1e-12, error, torch.inf)
            best = int(error.argmin())
            if error[best] <= tolerance:
                other = in_reward[best]
                rest, _ = fit(wanted - scale[best] * rewards[best], first)
                return (
                    Match(one.term, aggregation, rest, 0.0, None, one.written),
                    Match(other.term, aggregation, scale[best].item(), 0.0, None, other.written),
                )
    return None


def _along(direction: Tensor, vectors: Tensor) -> Tensor:
    """The part of vectors [..., D] along a direction [D]."""
    share = (vectors @ direction) / (direction @ direction).clamp(min=1e-300)
    return share.unsqueeze(-1) * direction


def _with_aggregation(found: Identity, reading: Reading, probes: Probes) -> Identity:
    if reading.kind == "reward":
        divided = found.match is not None and found.match.aggregation == "seq_mean_token_mean"
        return replace(found, divided=divided and reading.ragged)
    known = found.match or found.under_fault or (found.twice[0] if found.twice else None)
    if known is not None:
        name = known.aggregation
        return replace(found, aggregation=None if name == SUM else name, weights_known=name != SUM)
    if probes.returns_tokens or reading.fewest > 1:
        return found
    batches = [*probes.batches[:2], *(probes.other.batches if probes.other else ())]
    weights = _weights_of_tokens(reading, batches)
    if weights is None:
        return found
    for name in probes.aggregations:
        expected = [weights_of(b.mask.double(), name) for b in batches]
        scale, error = fit(
            torch.cat([w.flatten() for w in weights]), torch.cat([w.flatten() for w in expected])
        )
        if error <= 1e3 * reading.tolerance and abs(scale - 1) < 1e-3:
            return replace(
                found, aggregation=None if name == SUM else name, weights_known=name != SUM
            )
    return replace(found, weights_known=False)


def _weights_of_tokens(reading: Reading, batches: list[Batch]) -> list[Tensor] | None:
    """[B, T]: each token's gradient over the one it has alone; None where that is no number."""
    found = []
    for batch in batches:
        whole = reading.kl(batch).gradient
        weights = torch.zeros(batch.mask.shape, dtype=torch.float64)
        for row, column in batch.mask.nonzero().tolist():
            alone = reading.kl(_one_token(batch, row, column)).gradient.flatten()
            here = whole[row, column].flatten()
            scale, error = fit(here, alone)
            if not error <= 1e3 * reading.tolerance:
                return None
            weights[row, column] = scale
        found.append(weights)
    return found


def _one_token(batch: Batch, row: int, column: int) -> Batch:
    def cut(x: Tensor) -> Tensor:
        return x[row : row + 1, column : column + 1] if x.ndim > 1 else x[row : row + 1]

    return Batch(*(cut(getattr(batch, name)) for name in batch.__dataclass_fields__))
