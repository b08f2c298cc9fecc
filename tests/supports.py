"""One state in which policy, sampler and reference may forbid tokens: what a loss does there."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from kl_term.kl.term import KLTerm


class Supports(NamedTuple):
    """Logits [V] of each policy, ``-inf`` where it forbids a token."""

    policy: Tensor
    sampler: Tensor
    reference: Tensor

    def hold(self, inside: str, around: str) -> bool:
        """Whether one support lies inside another."""
        allowed, by = (getattr(self, name) > -torch.inf for name in (inside, around))
        return bool((by | ~allowed).all())


def overlaps(*, seed: int) -> list[Supports]:
    """Every way in which three supports can overlap, as long as one token belongs to all of them.

    The seven regions of the diagram hold two tokens each or none; the logits are random.
    """
    generator = torch.Generator().manual_seed(seed)
    regions = [r for r in itertools.product((True, False), repeat=3) if any(r)]
    cases = []
    for present in itertools.product((True, False), repeat=len(regions) - 1):
        there = [r for r, is_there in zip(regions, (True, *present), strict=True) if is_there]
        allowed = torch.tensor(there).repeat_interleave(2, dim=0).T
        logits = torch.randn(allowed.shape, generator=generator, dtype=torch.float64)
        cases.append(Supports(*torch.where(allowed, logits, -torch.inf)))
    return cases


def of_loss(case: Supports, estimator: str, weighting: str) -> Tensor:
    """[V]: expected gradient of a weighted KL loss, by autograd, over the tokens that are drawn."""
    leaf = case.policy.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(
        report(case._replace(policy=leaf), estimator, weighting), leaf
    )
    return gradient


def report(case: Supports, estimator: str, weighting: str) -> Tensor:
    """The loss's mean (nats), a scalar."""
    drawn = (case.sampler > -torch.inf) & (case.policy > -torch.inf)
    logps = (x.log_softmax(-1)[drawn].unsqueeze(-1) for x in case)
    logp, old_logp, ref_logp = logps
    loss = KLTerm(estimator=estimator, weighting=weighting).loss(logp, ref_logp, old_logp=old_logp)
    return (old_logp.exp() * loss).sum()
