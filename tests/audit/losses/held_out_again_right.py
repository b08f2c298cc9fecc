"""Right losses of the second set held out, in spellings of their own."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def distilled_by_policy_gradient(
    student_logprobs, teacher_logprobs, old_logprobs, padding_mask, kl_coef=1.0
):
    """On-policy distillation: the ratio times a log-ratio whose own gradient cancels in
    expectation."""
    m = padding_mask.bool()
    reverse_kl = torch.where(m, student_logprobs - teacher_logprobs, 0.0)
    ratio = torch.where(m, student_logprobs - old_logprobs, 0.0).exp()
    return kl_coef * (ratio * reverse_kl).sum() / m.sum()


def softmax_of_log_softmax(logits, ref_logits, mask, beta=0.1):
    """The exact reverse KL; a softmax of a log-softmax is that softmax."""
    m = mask.bool()
    logp, ref_logp = logits.log_softmax(-1), ref_logits.detach().log_softmax(-1)
    inner = torch.linalg.vecdot(F.softmax(logp, dim=-1), logp - ref_logp)
    return beta * torch.masked_select(inner, m).mean()


def by_huber(logps, ref_logps, completion_mask, kl_weight=0.05):
    """k2 as a Huber loss whose linear part is never reached."""
    m = completion_mask.bool()
    a, b = logps.masked_fill(~m, 0.0), ref_logps.masked_fill(~m, 0.0)
    return kl_weight * F.huber_loss(a, b, reduction="sum", delta=1e9) / m.sum()


def row_by_row(logprobs, ref_logprobs, response_mask, kl_coef=0.01):
    """A loop over answers of what is left of each after its mask."""
    total = 0.0
    for logp, ref_logp, m in zip(logprobs, ref_logprobs, response_mask.bool(), strict=True):
        gap = logp[m] - ref_logp[m]
        total = total + torch.dot(gap, gap) / (2 * gap.numel())
    return kl_coef * total / len(logprobs)


def by_masked_mean(log_probs, ref_log_probs, action_mask, beta=0.04):
    """k3 under ``torch.masked.mean``."""
    m = action_mask.bool()
    x = torch.where(m, ref_log_probs - log_probs, 0.0)
    return beta * torch.masked.mean(torch.expm1(x).sub(x), mask=m)


def in_chunks(logprobs, old_logprobs, ref_logprobs, mask, kl_coef=0.02):
    """k2 with the detached ratio, added up two columns at a time."""
    m = mask.bool()
    pieces = (x.split(2, dim=1) for x in (logprobs, old_logprobs, ref_logprobs, m))
    total, count = logprobs.new_zeros(()), 0
    for logp, old_logp, ref_logp, kept in zip(*pieces, strict=True):
        gap = torch.where(kept, logp - ref_logp, 0.0)
        rho = torch.where(kept, logp.detach() - old_logp, 0.0).exp()
        total = total + torch.einsum("bt,bt,bt->", rho, gap, gap) / 2
        count += int(kept.sum())
    return kl_coef * total / max(count, 1)


class _Penalty:
    """A loss that is an object."""

    def __init__(self, kl_coef):
        self.kl_coef = kl_coef

    def __call__(self, log_prob, ref_log_prob, loss_mask):
        m = loss_mask.bool()
        gap = torch.where(m, log_prob - ref_log_prob, 0.0)
        return {"loss": self.kl_coef * gap.pow(2).div(2).sum() / m.sum(), "kl": gap.mean().item()}


def callable_object(kl_coef=0.1):
    """An object with ``__call__`` that returns a dictionary."""
    return _Penalty(kl_coef)


def clipped_in_logs(
    logprobs, old_logprobs, ref_logprobs, advantages, response_mask, eps=0.2, kl_coef=0.01
):
    """PPO's clip of the log-ratio, and k2 beside it."""
    m = response_mask.bool()
    adv = torch.where(m, advantages, 0.0)
    gap = torch.where(m, logprobs - old_logprobs, 0.0)
    held = gap.clamp(math.log1p(-eps), math.log1p(eps))
    pg = torch.maximum(-adv * gap.exp(), -adv * held.exp())
    k2 = torch.where(m, logprobs - ref_logprobs, 0.0).square().mul(0.5)
    return (torch.where(m, pg, 0.0).sum() + kl_coef * k2.sum()) / m.sum()


def scored_tokens(rewards, old_logprobs, ref_logprobs, response_mask, kl_coef=0.05):
    """Token rewards: each pays for its log-ratio, the last is paid the score."""
    m = response_mask.bool()
    last = F.one_hot(m.sum(-1) - 1, m.shape[1]).to(rewards.dtype)
    owed = torch.where(m, old_logprobs - ref_logprobs, 0.0)
    return torch.addcmul(last * rewards.unsqueeze(-1), owed, -torch.ones_like(owed) * kl_coef)


def in_double(policy_logprobs, ref_logprobs, loss_mask, kl_coef=0.05):
    """k2 in double precision whatever comes in, and in the input's on the way out."""
    m = loss_mask.bool()
    gap = torch.where(m, policy_logprobs.double() - ref_logprobs.double(), 0.0)
    per_row = (gap * gap).sum(-1) / (2.0 * m.sum(-1))
    return (kl_coef * per_row.mean()).to(policy_logprobs.dtype)


def squared_sum_by_matmul(logprobs, ref_logprobs, mask, beta=0.05):
    """Half the squared log-ratio of whole answers, their sums taken by a product with ones."""
    m = mask.bool()
    gap = (logprobs - ref_logprobs).masked_fill(~m, 0.0)
    whole = gap @ torch.ones(gap.shape[1], dtype=gap.dtype)
    return beta * (whole @ whole) / (2 * len(whole))


def by_categorical(logits, ref_logits, old_logprobs, tokens, mask, beta=0.04):
    """k3 with a live ratio, its log-probs from ``torch.distributions``."""
    m = mask.bool()
    logp = torch.distributions.Categorical(logits=logits).log_prob(tokens)
    ref_logp = torch.distributions.Categorical(logits=ref_logits).log_prob(tokens).detach()
    log_r = torch.where(m, ref_logp - logp, 0.0)
    weight = torch.where(m, logp - old_logprobs, 0.0).exp()
    return beta * torch.where(m, weight * (log_r.exp() - 1 - log_r), 0.0).sum() / m.sum()


def cispo(log_probs, old_log_probs, ref_log_probs, advantages, action_mask, kl_coef=0.01):
    """CISPO: the clipped ratio is a weight on the log-prob, and detached; with k2."""
    m = action_mask.bool()
    logp, old, ref, adv = (
        torch.where(m, x, 0.0) for x in (log_probs, old_log_probs, ref_log_probs, advantages)
    )
    weight = (logp - old).exp().clamp(max=5.0).detach()
    loss = kl_coef * (logp - ref) ** 2 / 2 - weight * adv * logp
    return (loss * m).sum() / m.sum()


def by_bregman(logits, ref_logits, loss_mask, kl_coef=0.02):
    """The exact reverse KL as the Bregman divergence of the log-partition function."""
    m = loss_mask.bool()
    ref_logits = ref_logits.detach()
    mean_gap = (logits.softmax(-1) * (ref_logits - logits)).sum(-1)
    kl = ref_logits.logsumexp(-1) - logits.logsumexp(-1) - mean_gap
    return kl_coef * kl.masked_fill(~m, 0.0).sum() / m.sum()


def soft_labels(student_logits, teacher_logits, mask, kd_weight=1.0):
    """The forward KL up to the teacher's entropy, by ``F.cross_entropy`` with probabilities."""
    m = mask.bool()
    target = teacher_logits.detach()[m].softmax(-1)
    return kd_weight * F.cross_entropy(student_logits[m], target)
