r"""What a loss minimises in expectation, by name: divergences of policy, reference and sampler.

Each is a function of log-probs over everything that can be drawn, the tokens of a state or the
answers of a tree, so that one definition serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Potential = Callable[[Tensor, Tensor, Tensor], Tensor]


class Place(Protocol):
    """Where an expected gradient is taken: one or more states, or a tree of answers."""

    @property
    def logits(self) -> Tensor: ...
    @property
    def ref_logits(self) -> Tensor: ...
    @property
    def old_logits(self) -> Tensor: ...
    def answer_logp(self, logits: Tensor) -> Tensor:
        """[..., N], log-probs of all that can be drawn."""


def _average(weight: Tensor, values: Tensor) -> Tensor:
    return torch.where(weight == 0, 0.0, weight * values).sum(-1)


#: Of log-probs [..., N] under policy, reference and sampler, in the order in which they are tried.
POTENTIALS: dict[str, Potential] = {
    "reverse KL": lambda p, r, o: _average(p.exp(), p - r),
    "forward KL": lambda p, r, o: _average(r.exp(), r - p),
    "E[k2]": lambda p, r, o: _average(p.exp(), (p - r).square() / 2),
    "total variation": lambda p, r, o: (p.exp() - r.exp()).abs().sum(-1) / 2,
    "half chi-square": lambda p, r, o: (2 * p - r).exp().sum(-1) / 2,
    "half chi-square of the reference": lambda p, r, o: (2 * r - p).exp().sum(-1) / 2,
    "half squared distance": lambda p, r, o: (p.exp() - r.exp()).square().sum(-1) / 2,
    "Jensen-Shannon": lambda p, r, o: _jensen_shannon(p, r),
    "negative entropy": lambda p, r, o: _average(p.exp(), p),
    "cross-entropy to the reference": lambda p, r, o: -_average(p.exp(), r),
    "reverse KL to the sampler": lambda p, r, o: _average(p.exp(), p - o),
    "forward KL to the sampler": lambda p, r, o: _average(o.exp(), o - p),
    "half chi-square to the sampler": lambda p, r, o: (2 * p - o).exp().sum(-1) / 2,
}
#: What is also looked for as a sum of two.
MIXED = ("reverse KL", "forward KL", "E[k2]", "negative entropy", "forward KL to the sampler")
NOTHING, NEITHER = "nothing", "neither"


def _jensen_shannon(p: Tensor, r: Tensor) -> Tensor:
    middle = torch.logaddexp(p, r) - math.log(2.0)
    return (_average(p.exp(), p - middle) + _average(r.exp(), r - middle)) / 2


class Minimised(NamedTuple):
    """What an expected gradient descends."""

    name: str  #: of :data:`POTENTIALS`, a sum or difference of two, ``nothing`` or ``neither``
    scale: float  #: the coefficient; negative where it is ascended
    from_reverse: float  #: median relative error to the gradient of the reverse KL

    @property
    def said(self) -> str:
        """With its sign and coefficient."""
        if self.name in (NOTHING, NEITHER):
            return self.name
        shown = self.name if self.name in POTENTIALS else f"({self.name})"
        size = abs(self.scale)
        times = {0.5: "half "}.get(round(size, 6), f"{size:.4g} ")
        if abs(size - 1) < 1e-6:
            times, shown = "", self.name
        text = ("minus " if self.scale < 0 else "") + times + shown
        return f"neither ({text})" if "sampler" in self.name else text

    @property
    def known(self) -> str:
        """As the contract names it: with the sign; what reads the sampler is ``neither``."""
        if "sampler" in self.name:
            return NEITHER
        return ("minus " if self.scale < 0 else "") + self.name


def potential_gradient(name: str, at: Place) -> Tensor:
    """[..., V]: the gradient of a potential by the policy's logits."""
    with torch.enable_grad():
        leaf = at.logits.detach().clone().requires_grad_(True)
        fixed = (at.answer_logp(x) for x in (at.ref_logits, at.old_logits))
        value = POTENTIALS[name](at.answer_logp(leaf), *fixed)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return gradient


class _Known(Mapping[str, list[Tensor]]):
    """The gradients of all potentials at some places, each computed when it is asked for.

    A place that many losses are asked about, such as a tree, keeps them.
    """

    def __init__(self, at: Sequence[Place]) -> None:
        self._at = at

    def __getitem__(self, name: str) -> list[Tensor]:
        return [self._of(name, place) for place in self._at]

    @staticmethod
    def _of(name: str, place: Place) -> Tensor:
        kept = vars(place).setdefault("_potentials", {})
        if name not in kept:
            kept[name] = potential_gradient(name, place)
        return kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(POTENTIALS)

    def __len__(self) -> int:
        return len(POTENTIALS)


def minimised(gradients: Sequence[Tensor], at: Sequence[Place], tolerance: float) -> Minimised:
    """The one potential, with one coefficient, whose gradient these are at every place.

    Args:
        gradients: expected ones, each by the logits of its place.
        at: where each was taken.
        tolerance: relative error up to which two gradients are the same.
    """
    known = _Known(at)
    fresh = all(torch.equal(place.logits, place.old_logits) for place in at)
    return decided(gradients, known, tolerance, fresh=fresh)


def decided(
    gradients: Sequence[Tensor],
    known: Mapping[str, Sequence[Tensor]],
    tolerance: float,
    *,
    fresh: bool,
) -> Minimised:
    """As :func:`minimised`, given the gradients of all potentials; fresh: the policy samples."""
    reverse = known["reverse KL"]
    if not all(bool(g.isfinite().all()) for g in gradients):
        return Minimised(NEITHER, math.nan, math.nan)
    apart = _median_error(gradients, reverse)
    if all(g.norm() <= tolerance * r.norm() for g, r in zip(gradients, reverse, strict=True)):
        return Minimised(NOTHING, 0.0, apart)
    names = [name for name in known if not (fresh and "sampler" in name)]
    for name in names:
        scale, error = _fit(gradients, known[name])
        if error <= tolerance:
            return Minimised(name, scale, apart)
    for first, second in combinations([name for name in MIXED if name in names], 2):
        for name, scale in _mixtures(gradients, known, first, second, tolerance):
            return Minimised(name, scale, apart)
    return Minimised(NEITHER, math.nan, apart)


def same(gradients: Sequence[Tensor], exact: Sequence[Tensor], tolerance: float) -> bool:
    """Whether gradients are exact ones up to one coefficient."""
    return _fit(gradients, exact)[1] <= tolerance


def _mixtures(
    gradients: Sequence[Tensor],
    known: Mapping[str, Sequence[Tensor]],
    first: str,
    second: str,
    tolerance: float,
) -> Iterator[tuple[str, float]]:
    """The sum of two potentials that this is, if any, and the coefficient of the first."""
    columns = torch.stack([_flat(known[first]), _flat(known[second])], dim=-1)
    fit = torch.linalg.lstsq(columns, _flat(gradients).unsqueeze(-1)).solution.squeeze(-1)
    pairs = zip(known[first], known[second], strict=True)
    if _worst(gradients, [fit[0] * a + fit[1] * b for a, b in pairs]) <= tolerance:
        ratio = (fit[1] / fit[0]).item()
        yield _sum_of(first, second, ratio), fit[0].item()


def _sum_of(first: str, second: str, ratio: float) -> str:
    """Such as ``reverse - forward`` or ``reverse KL + 0.5 negative entropy``."""
    sign = "+" if ratio > 0 else "-"
    if abs(abs(ratio) - 1) > 1e-5:
        return f"{first} {sign} {abs(ratio):.4g} {second}"
    if first.endswith(" KL") and second.endswith(" KL"):
        first, second = first.removesuffix(" KL"), second.removesuffix(" KL")
    return f"{first} {sign} {second}"


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])


def _fit(gradients: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, float]:
    """One coefficient for all places, and the largest error that it leaves at one."""
    a, b = _flat(gradients), _flat(exact)
    scale = (a @ b) / (b @ b)
    return scale.item(), _worst(gradients, [scale * x for x in exact])


def _worst(gradients: Sequence[Tensor], fitted: Sequence[Tensor]) -> float:
    found = torch.stack(
        [
            (g - f).norm() / g.norm().clamp(min=1e-300)
            for g, f in zip(gradients, fitted, strict=True)
        ]
    )
    return found.max().item()


def _median_error(gradients: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    errors = [((g - e).norm() / e.norm()).item() for g, e in zip(gradients, exact, strict=True)]
    return sorted(errors)[(len(errors) - 1) // 2]  # the lower of two, as torch has it
