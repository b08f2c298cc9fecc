r"""What a loss minimises in expectation, by name: divergences of policy, reference and sampler.

Each is a function of log-probs over everything that can be drawn, the tokens of a state or the
answers of a tree, so that one definition serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kl_term.audit.trees import Tree
from kl_term.kl.enumeration import exact_kl_gradient
from kl_term.kl.sequences import state_visits

Potential = Callable[[Tensor, Tensor, Tensor], Tensor]


def _average(weight: Tensor, values: Tensor) -> Tensor:
    return torch.where(weight == 0, 0.0, weight * values).sum()


#: Of log-probs [N] under policy, reference and sampler, in the order in which they are tried.
POTENTIALS: dict[str, Potential] = {
    "reverse KL": lambda p, r, o: _average(p.exp(), p - r),
    "forward KL": lambda p, r, o: _average(r.exp(), r - p),
    "E[k2]": lambda p, r, o: _average(p.exp(), (p - r).square() / 2),
    "total variation": lambda p, r, o: (p.exp() - r.exp()).abs().sum() / 2,
    "half chi-square": lambda p, r, o: (2 * p - r).exp().sum() / 2,
    "half chi-square of the reference": lambda p, r, o: (2 * r - p).exp().sum() / 2,
    "half squared distance": lambda p, r, o: (p.exp() - r.exp()).square().sum() / 2,
    "Jensen-Shannon": lambda p, r, o: _jensen_shannon(p, r),
    "negative entropy": lambda p, r, o: _average(p.exp(), p),
    "cross-entropy to the reference": lambda p, r, o: -_average(p.exp(), r),
    "reverse KL to the sampler": lambda p, r, o: _average(p.exp(), p - o),
    "forward KL to the sampler": lambda p, r, o: _average(o.exp(), o - p),
    "half chi-square to the sampler": lambda p, r, o: (2 * p - o).exp().sum() / 2,
}
#: What is also looked for as a sum of two.
MIXED = ("reverse KL", "forward KL", "E[k2]", "negative entropy", "forward KL to the sampler")
NOTHING, NEITHER = "nothing", "neither"


def _jensen_shannon(p: Tensor, r: Tensor) -> Tensor:
    middle = torch.logaddexp(p, r) - torch.tensor(2.0).log()
    return (_average(p.exp(), p - middle) + _average(r.exp(), r - middle)) / 2


class Minimised(NamedTuple):
    """What an expected gradient descends."""

    name: str  #: of :data:`POTENTIALS`, a sum or difference of two, ``nothing`` or ``neither``
    scale: float  #: the coefficient; negative where it is ascended
    error: float  #: relative to the gradient
    from_reverse: float  #: relative error to the gradient of the reverse KL

    @property
    def said(self) -> str:
        """With its sign and coefficient."""
        if self.name in (NOTHING, NEITHER):
            return self.name
        if self.name in POTENTIALS and "sampler" in self.name:
            return f"neither ({'minus ' if self.scale < 0 else ''}{self.name})"
        size = "" if abs(abs(self.scale) - 1) < 1e-6 else f"{abs(self.scale):.4g} "
        return ("minus " if self.scale < 0 else "") + size + self.name

    @property
    def known(self) -> str:
        """As the contract names it: with the sign, and without what no list of divergences holds."""
        if "sampler" in self.name:
            return NEITHER
        return ("minus " if self.scale < 0 else "") + self.name


def potential_gradient(name: str, at: Tree) -> Tensor:
    """[states, V]: the gradient of a potential of whole answers by the policy's table."""
    with torch.enable_grad():
        leaf = at.logits.detach().clone().requires_grad_(True)
        fixed = (at.answer_logp(x) for x in (at.ref_logits, at.old_logits))
        value = POTENTIALS[name](at.answer_logp(leaf), *fixed)
        (gradient,) = torch.autograd.grad(value, leaf)
    return gradient


def visited_gradient(at: Tree, *, direction: str) -> Tensor:
    """[states, V]: of a KL at the states that the sampler visits, held fixed."""
    visits = state_visits(at.old_logits, at.sequences).unsqueeze(-1)
    return visits * exact_kl_gradient(at.logits, at.ref_logits, direction=direction)


def minimised(gradients: Sequence[Tensor], at: Sequence[Tree], tolerance: float) -> Minimised:
    """The one potential, with one coefficient, whose gradient these are at every place.

    Args:
        gradients: [states, V] each, expected.
        at: where each was taken.
        tolerance: relative error up to which two gradients are the same.
    """
    known = {name: [potential_gradient(name, place) for place in at] for name in POTENTIALS}
    reverse = known["reverse KL"]
    apart = _relative(gradients, reverse)
    if all(g.norm() <= tolerance * r.norm() for g, r in zip(gradients, reverse, strict=True)):
        return Minimised(NOTHING, 0.0, 0.0, apart)
    fresh = all(torch.equal(place.logits, place.old_logits) for place in at)
    names = [name for name in known if not (fresh and "sampler" in name)]
    for name in names:
        scale, error = _fit(gradients, known[name])
        if error <= tolerance:
            return Minimised(name, scale, error, apart)
    for index, first in enumerate(MIXED):
        for second in MIXED[index + 1 :]:
            if fresh and "sampler" in second:
                continue
            found = _mixture(gradients, known, first, second, tolerance)
            if found is not None:
                return Minimised(*found, apart)
    return Minimised(NEITHER, float("nan"), _fit(gradients, reverse)[1], apart)


def same(gradients: Sequence[Tensor], exact: Sequence[Tensor], tolerance: float) -> bool:
    """Whether gradients are exact ones up to one coefficient."""
    return _fit(gradients, exact)[1] <= tolerance


def _mixture(
    gradients: Sequence[Tensor],
    known: dict[str, list[Tensor]],
    first: str,
    second: str,
    tolerance: float,
) -> tuple[str, float, float] | None:
    """A sum of two potentials, written with coefficient one on the first."""
    columns = torch.stack([_flat(known[first]), _flat(known[second])], dim=-1)
    wanted = _flat(gradients)
    fit = torch.linalg.lstsq(columns, wanted.unsqueeze(-1)).solution.squeeze(-1)
    error = _worst(gradients, [fit[0] * a + fit[1] * b for a, b in zip(
        known[first], known[second], strict=True)])  # fmt: skip
    if error > tolerance:
        return None
    scale, ratio = fit[0].item(), (fit[1] / fit[0]).item()
    size = "" if abs(abs(ratio) - 1) < 1e-5 else f"{abs(ratio):.4g} "
    short = second.removesuffix(" KL") if size == "" else second
    left = first.removesuffix(" KL") if size == "" and second == "forward KL" else first
    if size == "" and second == "forward KL":
        return f"{left} {'+' if ratio > 0 else '-'} {short}", scale, error
    return f"{first} {'+' if ratio > 0 else '-'} {size}{second}", scale, error


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])


def _fit(gradients: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, float]:
    """One coefficient for all places, and the largest error that it leaves at one."""
    a, b = _flat(gradients), _flat(exact)
    scale = (a @ b) / (b @ b)
    return scale.item(), _worst(gradients, [scale * x for x in exact])


def _worst(gradients: Sequence[Tensor], fitted: Sequence[Tensor]) -> float:
    return max(
        ((g - f).norm() / g.norm().clamp(min=1e-300)).item()
        for g, f in zip(gradients, fitted, strict=True)
    )


def _relative(gradients: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    errors = [((g - e).norm() / e.norm()).item() for g, e in zip(gradients, exact, strict=True)]
    return sorted(errors)[len(errors) // 2]
