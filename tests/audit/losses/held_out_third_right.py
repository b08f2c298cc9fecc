"""Right losses of the third set held out, by somebody who had not seen the audit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


def grpo_weighted_kl(
    per_token_logps,
    old_per_token_logps,
    ref_per_token_logps,
    advantages,
    completion_mask,
    beta=0.04,
    epsilon_low=0.2,
    epsilon_high=0.28,
    max_completion_length=8,
):
    """GRPO with k3 times a live ratio, over a constant length."""
    mask = completion_mask.bool()
    cur = per_token_logps.masked_fill(~mask, 0.0)
    old = old_per_token_logps.detach().masked_fill(~mask, 0.0)
    ref = ref_per_token_logps.detach().masked_fill(~mask, 0.0)
    adv = advantages.detach().unsqueeze(-1)
    coef_1 = (cur - old).exp()
    coef_2 = coef_1.clamp(1 - epsilon_low, 1 + epsilon_high)
    per_token_loss = -torch.min(coef_1 * adv, coef_2 * adv)
    delta = ref - cur
    per_token_kl = coef_1 * (torch.expm1(delta) - delta)
    per_token_loss = per_token_loss + beta * per_token_kl
    loss = (per_token_loss * mask).sum() / (mask.size(0) * max_completion_length)
    return {"loss": loss, "mean_kl": per_token_kl[mask].mean().detach()}


class SquaredLogRatio(nn.Module):
    """Penalty of an actor; call with log_probs, ref_log_probs, action_mask: [B, T]."""

    def __init__(self, init_kl_coef=0.01, max_new_tokens=8):
        super().__init__()
        self.coef = init_kl_coef
        self.register_buffer("scale", torch.tensor(1.0 / max_new_tokens))

    def forward(self, log_probs, ref_log_probs, action_mask):
        rows, cols = action_mask.nonzero(as_tuple=True)
        gap = log_probs[rows, cols] - ref_log_probs[rows, cols].detach()
        return (
            self.coef * 0.5 * torch.dot(gap, gap) * self.scale.to(gap.dtype) / action_mask.shape[0]
        )


def squared_kl_module(log_probs, ref_log_probs, action_mask, init_kl_coef=0.01, max_new_tokens=8):
    """k2 by a module, over a constant length."""
    return SquaredLogRatio(init_kl_coef, max_new_tokens)(log_probs, ref_log_probs, action_mask)


def packed_score_kl(logp, ref_logp, loss_mask, cu_seqlens, kl_coeff=0.01):
    """The reverse KL's score function in a pack, summed by answer.

    Answers lie end to end; also returns the KL of each.
    """
    keep = loss_mask.bool()
    logp = torch.where(keep, logp, torch.zeros_like(logp))
    gap = torch.where(keep, logp.detach() - ref_logp.detach(), torch.zeros_like(logp))
    run = torch.cat([logp.new_zeros(1), torch.cumsum(gap * logp, 0)])
    per_seq = run[cu_seqlens[1:]] - run[cu_seqlens[:-1]]
    with torch.no_grad():
        raw = torch.cat([gap.new_zeros(1), torch.cumsum(gap, 0)])
        value = raw[cu_seqlens[1:]] - raw[cu_seqlens[:-1]]
    return kl_coeff * per_seq.mean(), value


def divergence_logits(
    student_logits,
    teacher_logits,
    labels,
    alpha=1.0,
    weight=1.0,
    num_items_in_batch=None,
    chunk_size=2,
):
    """The full reverse KL in chunks, where labels hold the mask.

    Logits of a position predict the next label; alpha 1 is student to teacher.
    """
    labels = labels[:, 1:].reshape(-1)
    keep = labels != -100
    s = student_logits[:, :-1].reshape(-1, student_logits.size(-1))[keep]
    t = teacher_logits[:, :-1].reshape(-1, teacher_logits.size(-1))[keep].detach()
    total = s.new_zeros(())
    for a in range(0, s.size(0), chunk_size):
        ls = F.log_softmax(s[a : a + chunk_size], dim=-1)
        lt = F.log_softmax(t[a : a + chunk_size], dim=-1)
        if alpha == 1.0:
            kl = F.kl_div(lt, ls, reduction="none", log_target=True)
        else:
            kl = F.kl_div(ls, lt, reduction="none", log_target=True)
        total = total + kl.sum()
    return (
        weight
        * total
        / (num_items_in_batch if num_items_in_batch is not None else keep.sum().clamp(min=1))
    )


def soft_cross_entropy(student_logits, teacher_logits, response_mask, kd_coef=1.0, temperature=1.0):
    """The forward KL up to the teacher's entropy, by logsumexp."""
    keep = response_mask.bool()
    s, t = student_logits[keep] / temperature, teacher_logits[keep].detach() / temperature
    p = torch.softmax(t, dim=-1)
    # sum_v p_v (logsumexp(s) - s_v)
    ce = torch.logsumexp(s, dim=-1) - (p * s).sum(-1)
    return kd_coef * temperature**2 * ce.sum() / response_mask.size(0)


@dataclass
class PolicyLossArgs:
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    eps_clip_c: float = 3.0
    kl_loss_coef: float = 0.01
    loss_scale_factor: float = 8.0


def clipped_max_config(args, log_probs, old_log_probs, ref_log_probs, advantages, loss_masks):
    """Dual-clip PPO as a maximum of negatives, with k2 and a configuration."""
    m = loss_masks.bool()
    ppo_kl = (old_log_probs.detach() - log_probs)[m]
    adv = advantages.detach()[m]
    ratio = (-ppo_kl).exp()
    worst = torch.maximum(
        -ratio * adv, -ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high) * adv
    )
    pg = torch.where(adv < 0, torch.minimum(worst, -args.eps_clip_c * adv), worst)
    gap = (ref_log_probs.detach() - log_probs)[m]
    kl = gap.pow(2) / 2
    norm = loss_masks.shape[0] * args.loss_scale_factor
    loss = (pg.sum() + args.kl_loss_coef * kl.sum()) / norm
    return loss, {"ppo_kl": ppo_kl.mean().detach(), "kl_loss": kl.mean().detach()}


def gspo_loss(
    policy_logprobs,
    behavior_logprobs,
    reference_logprobs,
    seq_advantages,
    seq_mask,
    kl_beta=0.01,
    eps_low=3e-4,
    eps_high=4e-4,
):
    """GSPO, clipped by the sign of its advantage, with k2."""
    keep = seq_mask.bool()
    n = keep.sum(1).clamp(min=1)
    step = torch.where(keep, policy_logprobs - behavior_logprobs.detach(), 0.0)
    s = torch.exp(step.sum(1) / n)
    a = seq_advantages.detach()
    surrogate = torch.where(
        a >= 0, torch.clamp(s, max=1 + eps_high) * a, torch.clamp(s, min=1 - eps_low) * a
    )
    drift = torch.where(keep, policy_logprobs - reference_logprobs.detach(), 0.0)
    penalty = 0.5 * drift.square().sum(1) / n
    return (kl_beta * penalty - surrogate).mean()


def sg(x):
    return x.detach()


def gspo_token_straight(
    old_log_prob,
    log_prob,
    ref_log_prob,
    advantages,
    response_mask,
    kl_loss_coef=0.001,
    clip_ratio_low=3e-4,
    clip_ratio_high=4e-4,
):
    """GSPO-token, with the value of k3 and the gradient of k2."""
    m = response_mask.bool()
    lp, old, ref, adv = (
        x.masked_fill(~m, 0.0)
        for x in (log_prob, sg(old_log_prob), sg(ref_log_prob), sg(advantages))
    )
    seq = (lp - old).sum(-1, keepdim=True) / m.sum(-1, keepdim=True).clamp(min=1)
    ratio = torch.exp((sg(seq) + lp - sg(lp)).clamp(max=10.0))
    hi, lo = 1 + clip_ratio_high, 1 - clip_ratio_low
    pg = torch.max(-adv * ratio, -adv * ratio.clamp(lo, hi))
    k2 = 0.5 * (lp - ref) ** 2
    k3 = torch.expm1((ref - lp).clamp(max=20.0)) - (ref - lp)
    kl = sg(k3) - sg(k2) + k2
    per_seq = ((pg + kl_loss_coef * kl) * m).sum(-1) / m.sum(-1).clamp(min=1)
    return per_seq.mean(), (ratio[m] > hi).float().mean(), sg(kl)[m].mean()


def cispo_score(
    cur_logps,
    rollout_logps,
    ref_logps,
    advantages,
    completion_mask,
    kl_coef=0.01,
    epsilon_max=5.0,
    generation_length=8,
):
    """CISPO with the log-ratio inside its detached signal."""
    m = completion_mask.bool()
    w = torch.exp((cur_logps - rollout_logps).detach()[m]).clamp(max=epsilon_max)
    a = advantages.detach()[:, None].expand_as(cur_logps)[m]
    k1 = (cur_logps - ref_logps).detach()[m]
    lp = cur_logps[m]
    signal = w * (a - kl_coef * k1)
    loss = -(signal * lp).sum() / (completion_mask.size(0) * generation_length)
    return loss, {"is_capped": (w >= epsilon_max).float().mean(), "kl": k1.mean()}


def dapo_num_items(
    log_probs,
    old_log_probs,
    ref_log_probs,
    advantages,
    action_mask,
    truncated,
    num_items_in_batch,
    beta=0.0,
    clip_low=0.2,
    clip_high=0.28,
):
    """DAPO over the tokens of a step, with k1 times a live ratio.

    ``truncated`` rows take no part; ``num_items_in_batch`` are the step's tokens.
    """
    live = action_mask.bool() & ~truncated.bool()[:, None]
    zero = torch.zeros((), dtype=log_probs.dtype)
    x = torch.where(live, log_probs - old_log_probs.detach(), zero)
    r = torch.exp(x)
    a = advantages.detach()[:, None]
    obj = torch.minimum(r * a, torch.clamp(r, 1 - clip_low, 1 + clip_high) * a)
    if beta:
        # on the ratio's graph: the score part of the gradient comes from r
        y = torch.where(live, log_probs - ref_log_probs.detach(), zero)
        obj = obj - beta * r * y
    return -torch.where(live, obj, zero).sum() / num_items_in_batch


def dr_grpo_rewards(rewards, logps, ref_logps, mask, group_size=2, beta=0.01, max_tokens=8):
    """GRPO from rewards centred and not divided, with k1 times a ratio of one.

    Answers of a prompt lie side by side, on policy.
    """
    with torch.no_grad():
        groups = rewards.reshape(-1, group_size)
        adv = (groups - groups.mean(dim=1, keepdim=True)).reshape(-1)
    m = mask.bool()
    lp = torch.where(m, logps, 0.0)
    on_policy = torch.exp(lp - lp.detach())  # one in value
    k1 = torch.where(m, lp - ref_logps.detach(), 0.0)
    per_token = on_policy * (adv[:, None] - beta * k1)
    loss = -(per_token * m).sum() / (rewards.numel() * max_tokens)
    return loss, adv


@torch.no_grad()
def reward_to_go(scores, log_probs, ref_log_probs, response_mask, kl_coef=0.05):
    """k1 in the reward, as returns.

    Returns the weights of -log_prob, [B, T].
    """
    m = response_mask.bool()
    penalty = torch.where(m, log_probs - ref_log_probs, torch.zeros_like(log_probs)).mul_(-kl_coef)
    end = m.long().cumsum(1).argmax(1, keepdim=True)
    token_rewards = penalty.scatter_add(1, end, scores[:, None].to(penalty.dtype))
    total = token_rewards.sum(1, keepdim=True)
    returns = total - token_rewards.cumsum(1) + token_rewards
    return returns.masked_fill(~m, 0.0)


@torch.no_grad()
def rloo_sequence(
    rewards, old_per_token_logps, ref_per_token_logps, completion_mask, num_generations=2, beta=0.05
):
    """k1 of an answer in the reward of leave-one-out.

    Answers of a prompt lie side by side; returns [B].
    """
    keep = completion_mask.bool()
    kl = torch.where(keep, old_per_token_logps - ref_per_token_logps, 0.0).sum(-1)
    shaped = torch.addcmul(rewards, kl, torch.ones_like(kl), value=-beta).unflatten(
        0, (-1, num_generations)
    )
    k = num_generations
    adv = (shaped - shaped.mean(1, keepdim=True)) * (k / (k - 1))
    return adv.flatten()


def topk_generalised(
    student_logits, teacher_topk_logps, teacher_topk_ids, completion_mask, opd_coef=1.0
):
    """The generalised reverse KL on the teacher's top k.

    The teacher's log-probs and their tokens are [B, T, K].
    """
    keep = completion_mask.bool()
    logits, ids, lt = (
        student_logits[keep],
        teacher_topk_ids[keep],
        teacher_topk_logps[keep].detach(),
    )
    ls = logits.gather(-1, ids) - torch.logsumexp(logits, dim=-1, keepdim=True)
    ps, gap = ls.exp(), ls - lt
    # p_s log(p_s / p_t) - p_s + p_t, term by term >= 0
    terms = ps * (gap + torch.expm1(-gap))
    return opd_coef * terms.sum() / completion_mask.size(0)


def sequence_weighted_kl(
    logprobs, old_logprobs, ref_logprobs, loss_mask, position_ids, kl_coef=0.01
):
    """The log-ratio of an answer in a pack times its live ratio.

    Answers lie end to end; positions begin at 0 in each.
    """
    seq = (position_ids == 0).long().cumsum(0) - 1
    n = int(seq[-1]) + 1
    keep = loss_mask.bool()
    ids = seq[keep]
    moved = logprobs.new_zeros(n).index_add(0, ids, (logprobs - old_logprobs.detach())[keep])
    drift = logprobs.new_zeros(n).index_add(0, ids, (logprobs - ref_logprobs.detach())[keep])
    return kl_coef * (moved.exp() * drift).mean()
