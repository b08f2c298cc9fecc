"""Broken losses of the third set held out, by somebody who had not seen the audit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class ActorConfig:
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_loss_coef: float = 0.05
    loss_agg_mode: str = "token-mean"


def agg_loss(loss_mat, loss_mask, loss_agg_mode, batch_num_tokens):
    if loss_agg_mode == "token-mean":
        return loss_mat.sum() / batch_num_tokens
    seq = (loss_mat * loss_mask).sum(-1)
    if loss_agg_mode == "seq-mean-token-sum":
        return seq.mean()
    return (seq / loss_mask.sum(-1).clamp(min=1)).mean()


def roll_actor_loss(log_probs, old_log_probs, ref_log_probs, advantages, response_mask, config):
    """The token mean divides by the counted tokens and sums over every position.

    After alibaba/ROLL#444.
    """
    ratio = torch.exp(log_probs - old_log_probs.detach())
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    pg = -torch.min(ratio * advantages, clipped * advantages)
    kl = 0.5 * (log_probs - ref_log_probs.detach()).square()
    n = response_mask.sum().clamp(min=1)
    return agg_loss(pg + config.kl_loss_coef * kl, response_mask, config.loss_agg_mode, n)


def luspo_loss(
    per_token_logps,
    old_per_token_logps,
    ref_per_token_logps,
    advantages,
    completion_mask,
    beta=0.04,
    epsilon=0.2,
):
    """The mask never multiplies a loss of tokens, and an answer is weighted by its length.

    After huggingface/trl#6654.
    """
    mask = completion_mask.bool()
    log_ratio = (per_token_logps - old_per_token_logps.detach()).masked_fill(~mask, 0.0)
    log_is = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    coef_1 = log_is.exp()
    coef_2 = coef_1.clamp(1 - epsilon, 1 + epsilon)
    adv = advantages.detach().unsqueeze(1)
    per_token_loss = -torch.min(coef_1 * adv, coef_2 * adv)
    if beta != 0.0:
        delta = ref_per_token_logps.detach() - per_token_logps
        per_token_loss = per_token_loss + beta * (torch.expm1(delta) - delta)
    return (per_token_loss * mask.sum(1, keepdim=True)).mean()


def _masked_mean(x, mask):
    return (x.masked_fill(~mask, 0.0)).sum() / mask.sum().clamp(min=1)


def variant_loss(
    new_logps, old_logps, ref_logps, advantages, completion_mask, kl_beta=0.0, variant="gspo"
):
    """Log-ratios are centred over the batch, before the mask and on the graph.

    After MakazhanAlpamys/Soup#735.
    """
    mask = completion_mask.bool()
    adv = advantages.detach()[:, None]
    log_ratio = new_logps - old_logps.detach()
    if variant == "gspo":
        log_ratio = log_ratio - log_ratio.mean(dim=0, keepdim=True)
        token_loss = -(log_ratio.exp() * adv)
    else:
        ratio = log_ratio.exp()
        token_loss = -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
    loss = _masked_mean(token_loss, mask)
    if kl_beta:
        loss = loss + kl_beta * _masked_mean(0.5 * (new_logps - ref_logps.detach()) ** 2, mask)
    return loss


class ActorObjective(nn.Module):
    def __init__(self, clip=0.2, kl_reg_coef=0.0):
        super().__init__()
        self.clip = clip
        self.kl_reg_coef = kl_reg_coef

    def forward(self, logps, old_logps, ref_logps, advantages, action_mask):
        keep = action_mask.bool()
        logps, old_logps, ref_logps, advantages = (
            torch.where(keep, x, torch.zeros_like(x))
            for x in (logps, old_logps.detach(), ref_logps.detach(), advantages.detach())
        )
        ratio = (logps - old_logps).exp()
        clipped_ratio = torch.clamp(ratio, self.clip, 1 + self.clip)
        objective = torch.min(advantages * ratio, advantages * clipped_ratio)
        clip_ratio = ((advantages * ratio) > (advantages * clipped_ratio)).float()
        loss = -objective + self.kl_reg_coef * 0.5 * (logps - ref_logps).pow(2)
        loss = (loss * keep).sum(-1).mean()
        return loss, {"actor/clip_ratio": clip_ratio[keep].mean().item()}


def update_actor(logps, old_logps, ref_logps, advantages, action_mask, clip=0.2, kl_reg_coef=0.05):
    """The clip's range begins at eps, where 1 - eps was meant.

    After ChenmienTan/RL2#21.
    """
    return ActorObjective(clip, kl_reg_coef)(logps, old_logps, ref_logps, advantages, action_mask)


def grpo_fast_cispo(
    new_logprobs_BT,
    old_logprobs_BT,
    ref_logprobs_BT,
    advantages_BT,
    response_mask_BT,
    beta=0.05,
    clip_higher=0.28,
    loss_denominator=8.0,
):
    """CISPO's clamped ratio without its stop-gradient and without the log-prob.

    After allenai/open-instruct#1269.
    """
    m = response_mask_BT.bool()
    new, old, ref, adv = (
        x.masked_fill(~m, 0.0)
        for x in (
            new_logprobs_BT,
            old_logprobs_BT.detach(),
            ref_logprobs_BT.detach(),
            advantages_BT.detach(),
        )
    )
    ratio_BT = torch.exp(new - old)
    # cispo: upper bound only
    pg_losses_BT = -adv * torch.clamp(ratio_BT, max=1.0 + clip_higher)
    kl_BT = 0.5 * (new - ref) ** 2
    loss = ((pg_losses_BT + beta * kl_BT) * m).sum() / loss_denominator
    stats = {
        "policy/clipfrac_avg": (ratio_BT > 1.0 + clip_higher)[m].float().mean(),
        "objective/kl_avg": kl_BT[m].mean().detach(),
    }
    return loss, stats


def policy_loss_dual(
    old_log_prob,
    log_prob,
    ref_log_prob,
    advantages,
    response_mask,
    cliprange=0.2,
    clip_ratio_c=3.0,
    kl_loss_coef=0.0,
    norm=8.0,
):
    """The dual clip also acts where the advantage is positive.

    After thu-ml/tianshou#433.
    """
    mask = response_mask.bool()
    zero = torch.zeros_like(log_prob)
    delta = torch.where(mask, log_prob - old_log_prob.detach(), zero)
    adv = torch.where(mask, advantages.detach(), zero)
    ratio = torch.exp(delta)
    surr1 = ratio * adv
    surr2 = torch.clamp(ratio, 1.0 - cliprange, 1.0 + cliprange) * adv
    clip1 = torch.min(surr1, surr2)
    clip2 = torch.max(clip1, clip_ratio_c * adv)
    pg_loss = -(clip2 * mask).sum() / norm
    logr = torch.where(mask, log_prob - ref_log_prob.detach(), zero)
    kl_loss = (0.5 * logr.square()).sum() / norm
    clipfrac = (surr2 < surr1)[mask].float().mean()
    return pg_loss + kl_loss_coef * kl_loss, clipfrac, kl_loss


@torch.no_grad()
def reinforce_pp_returns(rewards, log_probs, ref_log_probs, loss_mask, kl_coef=0.1, gamma=1.0):
    """The KL of masked tokens enters the returns of the tokens before them.

    After radixark/miles#557.

    The mask is 0 on tool tokens and padding.
    """
    kl = log_probs - ref_log_probs
    B, T = kl.shape
    mask = loss_mask.to(kl.dtype)
    token_level_rewards = -kl_coef * kl
    last = T - 1 - mask.flip(-1).argmax(-1)
    token_level_rewards[torch.arange(B), last] += rewards
    returns = torch.zeros_like(kl)
    running = torch.zeros(B, dtype=kl.dtype)
    for t in reversed(range(T)):
        running = token_level_rewards[:, t] + gamma * running
        returns[:, t] = running
    return returns * mask


class PPOTrainer:
    def __init__(self, beta=0.1):
        self.beta = beta

    def kl_penalized_reward(self, reward, log_prob_rl, log_prob_sft, action_mask=None):
        ratio = (log_prob_rl - log_prob_sft).detach()
        # k3 in http://joschu.net/blog/kl-approx.html
        estimated_kl = (torch.exp(ratio) - 1) - ratio
        if action_mask is not None:
            estimated_kl = estimated_kl * action_mask
            estimated_kl.sum(dim=1) / action_mask.sum(dim=1)
        estimated_kl = estimated_kl.mean(dim=1)
        return reward - self.beta * estimated_kl, estimated_kl


def kl_penalized_reward(reward, log_prob_rl, log_prob_sft, action_mask=None, beta=0.1):
    """k3 of the inverted ratio in the reward, averaged over the padded width.

    Returns rewards and KLs, [B].
    """
    return PPOTrainer(beta).kl_penalized_reward(reward, log_prob_rl, log_prob_sft, action_mask)


def ppo_actor_sequence(
    logprobs, proximal_logprobs, ref_logprobs, advantages, loss_mask, eps_clip=0.2, kl_ctl=0.0
):
    """The advantage of a sequence is summed over masked positions too.

    After areal-project/AReaL#1346.
    """
    mask = loss_mask.bool()
    lens = mask.sum(-1).clamp(min=1)
    log_ratio = torch.where(mask, logprobs - proximal_logprobs.detach(), 0.0)
    # sequence-level importance sampling: geometric mean, one advantage for a sequence
    ratio = torch.exp(log_ratio.sum(-1) / lens)
    seq_adv = advantages.detach().sum(-1) / lens
    pg = torch.max(-seq_adv * ratio, -seq_adv * ratio.clamp(1 - eps_clip, 1 + eps_clip))
    kl = 0.5 * torch.where(mask, logprobs - ref_logprobs.detach(), 0.0).square().sum(-1)
    loss = (pg + kl_ctl * kl).mean()
    return loss, {"importance_weight": ratio.detach(), "kl": kl.detach()}


def rollout_logprob_loss(
    logits,
    input_ids,
    original_logprobs,
    ref_logprobs,
    advantages,
    loss_mask,
    temperature=0.6,
    epsilon=0.2,
    kl_coef=0.0,
):
    """The sampler's log-probs are divided by the temperature after the softmax.

    After PrimeIntellect-ai/prime-rl#697.

    Logits of a position predict the token of that position.
    """
    keep = loss_mask.bool()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    logprobs = logprobs.gather(-1, input_ids[..., None]).squeeze(-1)[keep]
    old = (original_logprobs / temperature).detach()[keep]
    adv = advantages.detach()[keep]
    ratio = torch.exp(logprobs - old)
    loss1 = -ratio * adv
    loss2 = -torch.clamp(ratio, 1 - epsilon, 1 + epsilon) * adv
    loss = torch.max(loss1, loss2).sum()
    kl = 0.5 * (logprobs - ref_logprobs.detach()[keep]) ** 2
    return (loss + kl_coef * kl.sum()) / loss_mask.shape[0]


def mmkd_reverse_kld(student_logits, teacher_logits, labels, kd_ratio=0.5):
    """The reverse KL is divided by the number of counted tokens twice.

    After modelscope/easydistill#16.

    Logits of a position predict the label of that position; -100 is not counted.
    """
    mask = labels.ne(-100)
    with torch.no_grad():
        teacher_logp = F.log_softmax(teacher_logits.float(), dim=-1).to(student_logits.dtype)
    student_logp = F.log_softmax(student_logits, dim=-1)
    student_logp = student_logp.masked_fill(~mask[..., None], 0.0)
    teacher_logp = teacher_logp.masked_fill(~mask[..., None], 0.0)
    kld = F.kl_div(teacher_logp, student_logp, reduction="none", log_target=True)
    kld = kld.sum(dim=-1) / mask.sum()
    loss = (kld.view(-1) * mask.view(-1)).sum() / mask.sum()
    return {"loss": kd_ratio * loss, "reverse_kld": loss.detach()}


def topk_distill(
    student_logits, teacher_topk_logprobs, teacher_topk_ids, response_mask, distill_coef=1.0
):
    """The reverse KL is truncated to the teacher's top k, and clamped at zero.

    After verl-project/verl#7806.

    The teacher's log-probs and their tokens are [B, T, K].
    """
    mask = response_mask.bool()
    log_q = torch.log_softmax(student_logits, dim=-1).gather(-1, teacher_topk_ids)
    log_p = teacher_topk_logprobs.detach()
    log_q, log_p = log_q[mask], log_p[mask]  # [N, K]
    # KL(q || p) on the transferred support
    losses = (log_q.exp() * (log_q - log_p)).sum(dim=-1)
    losses = losses.clamp_min(0.0)
    loss = losses.sum() / mask.shape[0]
    return distill_coef * loss, {"student_mass": log_q.exp().sum(-1).mean().item()}


@torch.no_grad()
def loo_advantages(
    rewards,
    logprobs,
    reference_logprobs,
    token_mask,
    num_generations=2,
    kl_coef=0.1,
    normalize_rewards=True,
    leave_one_out=True,
):
    """What leave-one-out leaves is divided by the spread of the others.

    After NVIDIA-NeMo/RL#1518.

    Answers of a prompt lie side by side; returns [B].
    """
    keep = token_mask.bool()
    kl = torch.where(keep, logprobs - reference_logprobs, 0.0).sum(-1)
    r = (rewards - kl_coef * kl).view(-1, num_generations)
    G = num_generations
    if leave_one_out:
        other = ~torch.eye(G, dtype=torch.bool)
        rest = torch.stack([r[:, other[i]] for i in range(G)], dim=1)  # [P, G, G - 1]
        baseline, std = rest.mean(-1), rest.std(-1, unbiased=False)
    else:
        baseline, std = r.mean(-1, keepdim=True), r.std(-1, keepdim=True)
    adv = r - baseline
    if normalize_rewards:
        adv = adv / (std + 1e-6)
    return adv.reshape(-1)


def packed_gspo(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    loss_mask,
    cu_seqlens,
    beta=0.0,
    clip_eps_low=0.2,
    clip_eps_high=0.2,
):
    """The ratio of a sequence is one mean over the whole pack.

    Answers lie end to end.
    """
    keep = loss_mask.bool()
    num_seqs = cu_seqlens.numel() - 1
    log_ratio = torch.where(keep, logprobs - old_logprobs.detach(), 0.0)
    seq_log_ratio = log_ratio.sum(-1, keepdim=True) / keep.sum(-1, keepdim=True).clamp(min=1)
    # GSPO-token: the sequence's ratio as value, the token's gradient
    ratio = torch.exp(seq_log_ratio.detach() + log_ratio - log_ratio.detach())
    adv = torch.where(keep, advantages.detach(), 0.0)
    pg = torch.max(-adv * ratio, -adv * ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high))
    kl = 0.5 * torch.where(keep, logprobs - ref_logprobs.detach(), 0.0) ** 2
    return ((pg + beta * kl) * keep).sum() / num_seqs


def coeff_loss(
    trainer_logprobs,
    inference_logprobs,
    ref_logprobs,
    advantages,
    loss_mask,
    cu_seqlens,
    kl_tau=1e-2,
    adv_tau=1.0,
    token_mask_high=8.0,
):
    """The squared log-ratio lies inside the detached coefficient.

    After PrimeIntellect-ai/prime-rl#1697.

    Answers lie end to end.
    """
    total, kls = trainer_logprobs.new_zeros(()), []
    for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        keep = loss_mask[a:b].bool()
        lp = trainer_logprobs[a:b][keep]
        old = inference_logprobs[a:b][keep].detach()
        log_ratio = lp - ref_logprobs[a:b][keep].detach()
        importance_ratio = torch.exp(lp - old)
        kl = 0.5 * log_ratio**2
        coeff = importance_ratio * (adv_tau * advantages[a:b][keep] - kl_tau * kl)
        coeff = torch.where(importance_ratio > token_mask_high, 0.0, coeff)
        total = total - (coeff.detach() * lp).sum()
        kls.append(kl.detach())
    return total / (cu_seqlens.numel() - 1), {"kl_loss": torch.cat(kls)}
