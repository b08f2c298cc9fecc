"""The direction of an arm's KL gradient against that of the exact reverse KL, in weight space."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from analysis.kl.divergences import reverse_kl
from analysis.training.batch import Batch
from analysis.training.divergence_term import Views
from analysis.training.rollout import token_logp
from analysis.training.step import Terms


class KLObjectives(NamedTuple):
    """Two losses [M], with gradient; the values mean nothing, the gradients do."""

    arm: Tensor
    exact: Tensor


def kl_objectives(terms: Terms, batch: Batch, logits: Tensor) -> KLObjectives:
    r"""What an arm's KL term adds to the loss, and the exact reverse KL with the same weights.

    .. math:: \sum_t w_t\, \beta \big(\ell_t + \rho_t \hat k_t\big) \quad \text{and} \quad
        \sum_t w_t\, \mathrm{KL}(\pi_\theta \Vert \pi_{\mathrm{ref}})(s_t)

    with :math:`\ell` the KL loss, :math:`\hat k` what a token owes of a KL in the reward, and
    :math:`\rho` the ratio to the sampler, unclipped. States count as given: what a token does to
    later states is in neither, unless ``to_go`` credit puts it in the arm's.

    Args:
        logits: [M, P, G, T, V], at the sampling temperature, with gradient.
    """
    rollout = batch.rollout
    old_logp, mask = rollout.old_logp, rollout.mask
    logp = token_logp(logits, rollout.completions, temperature=1.0)
    kl = terms.kl.loss(Views(logp, old_logp, batch.ref_logp, logits, batch.ref_logits, mask))
    ratio = torch.exp(torch.where(mask, logp - old_logp, 0.0))
    exact = torch.where(mask, reverse_kl(logits, batch.ref_logits), 0.0)
    weights = terms.policy.token_weights(batch, logp.dtype)
    owed = terms.kl.penalty(old_logp, batch.ref_logp, mask)
    parts = (kl + ratio * owed, exact)
    return KLObjectives(*((weights * part).flatten(1).sum(dim=1) for part in parts))


def cosine(left: Tensor, right: Tensor) -> Tensor:
    """[M]: cosine of the rows of [M, N] and [M, N]; NaN where a row is zero."""
    norms = torch.linalg.vector_norm(left, dim=1) * torch.linalg.vector_norm(right, dim=1)
    return torch.linalg.vecdot(left, right, dim=1) / norms


def kl_cosine(objectives: KLObjectives, weights: Tensor) -> Tensor:
    """[M]: :func:`cosine` of the gradients of both objectives in the weights [M, N].

    NaN without a KL term and where the policy is the reference.
    """
    (arm,) = torch.autograd.grad(objectives.arm.sum(), weights, retain_graph=True)
    (exact,) = torch.autograd.grad(objectives.exact.sum(), weights)
    return cosine(arm, exact)
