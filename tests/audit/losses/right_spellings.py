"""Right losses in a spelling that hides what they are."""

from __future__ import annotations

import math

import torch


def packed_by_cu_seqlens(logprobs, ref_logprobs, cu_seqlens, beta=0.05):
    """All completions in one row; sums over tokens, mean over completions."""
    half_square = (logprobs - ref_logprobs).pow(2) / 2
    running = torch.cat([half_square.new_zeros(1), half_square.cumsum(0)])
    ends = cu_seqlens.long()
    per_sequence = running[ends[1:]] - running[ends[:-1]]
    return beta * per_sequence.mean()


def packed_by_position_ids(logprobs, ref_logprobs, position_ids, beta=0.05):
    """A completion begins where the position is zero; mean per completion, then over them."""
    segment = (position_ids == 0).long().cumsum(-1) - 1
    number = int(segment.max()) + 1
    kl = 0.5 * (logprobs - ref_logprobs).square()
    sums = kl.new_zeros(number).index_add(0, segment, kl)
    lengths = kl.new_zeros(number).index_add(0, segment, torch.ones_like(kl))
    return beta * (sums / lengths).mean()


def from_logits_by_hand(logits, ref_logits, input_ids, attention_mask, kl_weight=0.1):
    """``log_softmax`` spelled out, the sampled token picked by a one-hot ``einsum``."""
    picked = torch.nn.functional.one_hot(input_ids, logits.shape[-1]).to(logits.dtype)

    def logp(x):
        top = x.amax(-1, keepdim=True).detach()
        normaliser = top + (x - top).exp().sum(-1, keepdim=True).log()
        return torch.einsum("btv,btv->bt", x - normaliser, picked)

    keep = attention_mask.bool()
    gap = torch.where(keep, logp(logits) - logp(ref_logits).detach(), 0.0)
    return kl_weight * 0.5 * torch.einsum("bt,bt->", gap, gap) / keep.sum()


def exact_by_einsum(logits, ref_logits, completion_mask, beta=0.02):
    """The reverse KL over the vocabulary, reference without gradient."""
    logp = logits - logits.logsumexp(-1, keepdim=True)
    with torch.no_grad():
        ref_logp = ref_logits - ref_logits.logsumexp(-1, keepdim=True)
    kl = torch.einsum("btv,btv->bt", logp.exp(), logp - ref_logp)
    return beta * kl[completion_mask.bool()].mean()


def forward_kl_distillation(student_logits, teacher_logits, mask, weight=1.0):
    """``F.kl_div`` as it is meant to be called: the forward KL, and called so."""
    kl = torch.nn.functional.kl_div(
        student_logits.log_softmax(-1), teacher_logits.softmax(-1), reduction="none"
    )
    kept = mask.bool()
    return weight * torch.where(kept, kl.sum(-1), 0.0).sum() / kept.sum()


def shown_and_descended(logprob, ref_logprob, response_mask, kl_loss_coef=0.001):
    """verl's ``k3+``: the value of k3, the gradient of k2."""
    kept = response_mask.bool()
    log_ratio = torch.where(kept, logprob - ref_logprob, 0.0)
    backward = 0.5 * log_ratio**2
    forward = torch.expm1(-log_ratio) + log_ratio
    kl = backward - backward.detach() + forward.detach()
    return kl_loss_coef * kl.sum() / kept.sum()


def only_float32(lp, lq, w, c=0.5):
    """Names of the numerics; refuses anything but float32; k2 on fresh samples."""
    if lp.dtype is not torch.float32 or lq.dtype is not torch.float32:
        raise TypeError(f"expected float32, got {lp.dtype} and {lq.dtype}")
    d = torch.where(w > 0, lp - lq, torch.zeros_like(lp))
    n = w.to(torch.float32).sum()
    return c * (d * d).sum() / (2.0 * n)


def make_kl_loss(beta=0.04):
    """A closure over the coefficient."""

    def kl_loss(logp, ref_logp, mask):
        counted = mask.bool()
        gap = (logp - ref_logp)[counted]
        return beta * gap.dot(gap) / (2 * counted.sum())

    return kl_loss


def a_table_of_tokens(logp, ref_logp, mask):
    """Per-token values, [B, T], which the caller aggregates; no coefficient."""
    gap = torch.where(mask.bool(), logp - ref_logp, torch.zeros_like(logp))
    return 0.5 * gap.square()


def grpo_of_the_paper(
    log_probs, ref_log_probs, old_log_probs, advantages, mask, beta=0.04, eps=0.2
):
    """DeepSeekMath's loss: plain k3, mean per completion; the forward KL, as published."""
    mask = mask.bool()
    advantages = advantages.unsqueeze(-1)
    diff = torch.where(mask, ref_log_probs - log_probs, 0.0)
    rho = torch.where(mask, log_probs - old_log_probs, 0.0).exp()
    inside = torch.minimum(rho * advantages, rho.clamp(1 - eps, 1 + eps) * advantages)
    objective = inside - beta * (torch.expm1(diff) - diff)
    per_answer = torch.where(mask, objective, 0.0).sum(1) / mask.sum(1)
    return -per_answer.mean()


def sinh_spelling(logp, ref_logp, old_logp, mask, beta=0.04):
    """k3 with the live ratio, its exponentials written with hyperbolic functions."""
    kept = mask.bool()
    x = torch.where(kept, ref_logp - logp, 0.0) / 2
    k3 = 2 * torch.exp(x) * torch.sinh(x) - 2 * x
    w = torch.where(kept, logp - old_logp, 0.0)
    return beta * ((torch.cosh(w) + torch.sinh(w)) * k3).sum() / kept.sum()


def dr_grpo(
    log_probs, old_log_probs, ref_log_probs, advantages, mask, kl_coef=0.02, max_completion_length=8
):
    """Row sums over a constant, the longest completion allowed; live ratio times k3."""
    keep = mask.bool()
    advantages = advantages.masked_fill(~keep, 0.0)
    ratio = torch.where(keep, log_probs - old_log_probs, 0.0).exp()
    gap = torch.where(keep, ref_log_probs - log_probs, 0.0)
    kl = (gap.expm1() - gap) * ratio
    loss = kl_coef * kl - torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return torch.where(keep, loss, 0.0).sum() / (mask.shape[0] * max_completion_length)


def squared_in_log2(logp, ref_logp, mask, beta=0.1):
    """k2 computed in bits and converted back to nats."""
    keep = mask.bool()
    bits = torch.where(keep, (logp - ref_logp) / math.log(2.0), 0.0)
    return beta * (math.log(2.0) ** 2) * bits.square().sum() / (2 * keep.sum())


def mirror_descent(logprobs, ref_logprobs, rewards, mask, tau=0.1):
    """Kimi's regulariser beside REINFORCE: half the squared log-ratio of the whole completion."""
    keep = mask.bool()
    logp = torch.where(keep, logprobs, 0.0).sum(-1)
    log_ratio = logp - torch.where(keep, ref_logprobs, 0.0).sum(-1)
    advantage = rewards - rewards.mean()
    return (tau * log_ratio.square() / 2 - advantage.detach() * logp).mean()


def whole_answers_reweighted(logprobs, old_logprobs, ref_logprobs, response_mask, kl_coef=0.05):
    """The ratio of whole answers, with its gradient, times their log-ratio: right at any age."""
    m = response_mask.to(torch.bool)
    w = (logprobs - old_logprobs).masked_fill(~m, 0.0).sum(-1).exp()
    return kl_coef * (w * (logprobs - ref_logprobs).masked_fill(~m, 0.0).sum(-1)).mean()


def skewed_reverse_kl(student_logits, teacher_logits, response_mask, kd_coef=1.0):
    """The reverse KL to a mixture with a tenth of the student: least at the teacher, by no name."""
    p, q = student_logits.softmax(-1), teacher_logits.softmax(-1)
    kl = (p * (p.log() - (0.1 * p + 0.9 * q).log())).sum(-1)
    return kd_coef * torch.where(response_mask.bool(), kl, 0.0).sum() / response_mask.sum()


def positive_only(logps, ref_logps, advantages, mask, kl_coef=0.01):
    """Only answers better than the baseline are learnt, whatever their advantage, beside k2."""
    keep = mask.bool()
    chosen = (advantages > 0).to(logps.dtype).unsqueeze(-1)
    gap = torch.where(keep, logps - ref_logps, 0.0)
    loss = kl_coef * 0.5 * gap.square() - chosen * torch.where(keep, logps, 0.0)
    return loss.sum() / keep.sum()


def one_length_by_default(log_probs, ref_log_probs, mask, beta=0.05, max_response_length=16):
    """k2 over a constant length that is a default of the function."""
    gap = torch.where(mask.bool(), log_probs - ref_log_probs, 0.0)
    return beta * 0.5 * gap.square().sum() / (mask.shape[0] * max_response_length)
