"""Right losses in spellings that no rule of the audit was written by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F


def half_mse(policy_logps, reference_logps, loss_mask, kl_weight=0.05):
    """k2 as half the mean squared error of the kept tokens."""
    kept = loss_mask.bool()
    return kl_weight * 0.5 * F.mse_loss(policy_logps[kept], reference_logps[kept])


def by_cross_entropy(logits, ref_logits, old_logprobs, labels, mask, beta=0.04):
    """Log-probs as minus a cross-entropy; k3 with the live ratio."""
    kept = mask.bool()
    logp = -F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    with torch.no_grad():
        ref_logp = -F.cross_entropy(ref_logits.transpose(1, 2), labels, reduction="none")
    diff = torch.where(kept, ref_logp - logp, 0.0)
    weight = torch.where(kept, logp - old_logprobs, 0.0).exp()
    return beta * (weight * (torch.expm1(diff) - diff)).sum() / kept.sum()


def by_distributions(logits, ref_logits, mask, beta=0.02):
    """``torch.distributions``: the exact reverse KL."""
    policy = torch.distributions.Categorical(logits=logits)
    reference = torch.distributions.Categorical(logits=ref_logits.detach())
    kl = torch.distributions.kl_divergence(policy, reference)
    return beta * kl[mask.bool()].mean()


class _HalfSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gap):
        ctx.save_for_backward(gap)
        return gap * gap / 2

    @staticmethod
    def backward(ctx, grad_output):
        (gap,) = ctx.saved_tensors
        return grad_output * gap


def by_custom_function(logprobs, ref_logprobs, response_mask, kl_coef=0.01):
    """k2 with a backward written by hand."""
    m = response_mask.bool()
    gap = torch.where(m, logprobs - ref_logprobs, torch.zeros_like(logprobs))
    return kl_coef * _HalfSquare.apply(gap).sum() / m.sum()


def by_weights(logp, ref_logp, old_logp, advantages, mask, beta=0.03):
    """Everything is one sum of token weights; the detached ratio on k2 and a live one on the
    advantage, without a clip."""
    m = mask.bool()
    weights = m.to(logp.dtype) / m.sum(-1, keepdim=True) / m.shape[0]
    logp, ref_logp, old_logp, advantages = (
        x.masked_fill(~m, 0.0) for x in (logp, ref_logp, old_logp, advantages)
    )
    rho = (logp - old_logp).exp()
    k2 = (logp - ref_logp) ** 2 / 2
    return torch.einsum("bt,bt->", weights, beta * rho.detach() * k2 - rho * advantages)


@dataclass
class Output:
    loss: torch.Tensor
    kl: float


def with_a_dataclass(logprobs, ref_logprobs, completion_mask, kl_beta=0.1):
    """Returns an object with ``.loss``."""
    m = completion_mask.bool()
    gap = torch.where(m, logprobs - ref_logprobs, 0.0)
    loss = kl_beta * (gap.square().sum(-1) / (2 * m.sum(-1).clamp(min=1))).mean()
    return Output(loss, loss.item())


def _configured(log_prob, ref_log_prob, response_mask, *, estimator, kl_coef=0.01):
    m = response_mask.bool()
    gap = torch.where(m, log_prob - ref_log_prob, 0.0)
    values = {"k1": gap, "k2": 0.5 * gap**2}
    return kl_coef * values[estimator].sum() / m.sum()


#: A partial of a configurable one.
configured = partial(_configured, estimator="k2")


def forward_from_entropies(student_logits, teacher_logits, mask, alpha=1.0):
    """Cross-entropy minus the teacher's entropy: the forward KL."""
    m = mask.bool()
    teacher = teacher_logits.softmax(-1).detach()
    cross = -(teacher * student_logits.log_softmax(-1)).sum(-1)
    entropy = -(teacher * teacher_logits.log_softmax(-1).detach()).sum(-1)
    return alpha * (cross - entropy)[m].mean()


def advantages_in_place(advantages, logprobs, ref_logprobs, mask, kl_coef=0.05):
    """The KL to go is added to a copy with the reference first, so that the sign is a plus."""
    m = mask.bool()
    owed = torch.where(m, ref_logprobs - logprobs, torch.zeros_like(logprobs))
    total = owed.sum(-1, keepdim=True)
    to_go = total - owed.cumsum(-1) + owed
    out = advantages.clone()
    out += kl_coef * to_go
    return out.masked_fill(~m, 0.0)


def gspo_with_token_kl(
    log_probs, old_log_probs, ref_log_probs, advantages, action_mask, kl_coef=0.01
):
    """GSPO's ratio on the advantage, the token's on its KL."""
    m = action_mask.bool()
    log_ratio = torch.where(m, log_probs - old_log_probs, 0.0)
    advantages = torch.where(m, advantages, 0.0)
    s = (log_ratio.sum(-1, keepdim=True) / m.sum(-1, keepdim=True)).exp()
    pg = -torch.min(s * advantages, s.clamp(0.8, 1.2) * advantages)
    x = torch.where(m, ref_log_probs - log_probs, 0.0)
    kl = log_ratio.exp() * (x.expm1() - x)
    return (torch.where(m, pg + kl_coef * kl, 0.0).sum(-1) / m.sum(-1)).mean()
