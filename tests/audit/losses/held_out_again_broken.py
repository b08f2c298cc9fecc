"""Broken losses of the second set held out, after other public reports than the first."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def clamped_surrogate(
    logps, old_logps, ref_logps, advantages, completion_mask, clip_eps=0.2, beta=0.04
):
    """The product of ratio and advantage is clamped where the ratio should be.

    After alexis-jacq/Pytorch-DPPO#3.
    """
    m = completion_mask.bool()
    adv = torch.where(m, advantages, 0.0)
    ratio = torch.where(m, logps - old_logps, 0.0).exp()
    surr1 = ratio * adv
    surr2 = surr1.clamp(1 - clip_eps, 1 + clip_eps)
    kl = torch.where(m, logps - ref_logps, 0.0).square() / 2
    per_token = -torch.min(surr1, surr2) + beta * kl
    return torch.where(m, per_token, 0.0).sum() / m.sum()


def mean_over_the_vocabulary(student_logits, teacher_logits, loss_mask, kd_coef=1.0):
    """The summands of the KL are averaged over the vocabulary, not summed.

    After HikariTJU/LD#74.
    """
    m = loss_mask.bool()
    teacher = teacher_logits.detach().softmax(dim=-1)
    kd = F.kl_div(student_logits.log_softmax(dim=-1), teacher, reduction="none").mean(dim=-1)
    return kd_coef * kd[m].mean()


def fell_through(log_probs, log_probs_base, response_mask, kl_coef=0.02, kl_estimator="k2"):
    """Asked for k2 it computes k2, and then k3 over it: an ``if`` where ``elif`` was meant.

    After areal-project/AReaL#408.
    """
    m = response_mask.bool()
    log_ratio = torch.where(m, log_probs - log_probs_base, 0.0)
    kl = log_ratio
    if kl_estimator == "k2":
        kl = log_ratio**2 / 2.0
    if kl_estimator != "k1":
        kl = (-log_ratio).exp() - 1 + log_ratio
    return kl_coef * (kl * m).sum() / m.sum()


def price_of_a_prefix(advantages, student_logits, teacher_logits, response_mask, opd_kl_coef=0.1):
    """The reverse KL over the vocabulary is taken off the advantage of whatever was drawn; it is
    the same for every token, so that it has no gradient in expectation.

    After radixark/miles#2362.
    """
    m = response_mask.bool()
    with torch.no_grad():
        s, t = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        reverse_kl = (s.exp() * (s - t)).sum(-1)
    return torch.where(m, advantages - opd_kl_coef * reverse_kl, 0.0)


def token_weight_on_rows(
    log_prob, old_log_prob, ref_log_prob, advantages, response_mask, kl_loss_coef=0.01
):
    """The policy loss of an answer, [B], is multiplied by a weight of its tokens, [B, T].

    After verl-project/verl#3245.
    """
    m = response_mask.bool()
    n = m.sum(-1)
    gap = torch.where(m, log_prob - old_log_prob, 0.0)
    ratio = (gap.sum(-1) / n).exp()
    advantage = torch.where(m, advantages, 0.0).sum(-1) / n
    pg_losses = -advantage * ratio
    tis = gap.detach().exp().clamp(max=2.0)
    pg_losses = pg_losses * tis
    kl = torch.where(m, log_prob - ref_log_prob, 0.0).square().sum(-1) / 2 / n
    return torch.where(m, pg_losses, 0.0).sum() / m.sum() + kl_loss_coef * kl.mean()


def one_advantage_for_all(
    new_logprobs, old_logprobs, ref_logprobs, advantages, mask, clip_param=0.2, kl_coef=0.05
):
    """Every ratio is multiplied by the mean of all advantages.

    After Omegastick/pytorch-cpp-rl#14.
    """
    m = mask.bool()
    adv = advantages[m].mean()
    ratio = torch.where(m, new_logprobs - old_logprobs, 0.0).exp()
    pg = -torch.min(ratio * adv, ratio.clamp(1 - clip_param, 1 + clip_param) * adv)
    kl = 0.5 * torch.where(m, new_logprobs - ref_logprobs, 0.0) ** 2
    return torch.where(m, pg + kl_coef * kl, 0.0).sum() / m.sum()


def jsd_of_mixed_logs(student_logits, teacher_logits, mask, coef=0.5, mix=0.5):
    """The mixture of a Jensen-Shannon divergence is taken of log-probs, and is no distribution.

    After huggingface/trl#2202.
    """
    m = mask.bool()
    s, t = student_logits.log_softmax(-1), teacher_logits.detach().log_softmax(-1)
    between = mix * s + (1 - mix) * t
    to_teacher = F.kl_div(between, t, log_target=True, reduction="none").sum(-1)
    to_student = F.kl_div(between, s, log_target=True, reduction="none").sum(-1)
    return coef * (mix * to_teacher + (1 - mix) * to_student)[m].mean()


def infinite_is_zero(gen_log_probs, ref_log_probs, mask, coeff=0.1):
    """A log-ratio that is infinite costs nothing: what the reference never gives is free.

    After pytorch/rl#4255.
    """
    m = mask.bool()
    diff = torch.where(m, gen_log_probs - ref_log_probs, 0.0)
    diff = torch.where(torch.isfinite(diff), diff, torch.zeros_like(diff))
    return coeff * (0.5 * diff**2).sum() / m.sum()


def score_on_padding(scores, logprobs, ref_logprobs, padding_mask, kl_coef=0.05):
    """The score is paid at the first position after the answer, which is masked.

    After huggingface/trl#5338.
    """
    m = padding_mask.bool()
    rewards = -kl_coef * torch.where(m, logprobs - ref_logprobs, 0.0).detach()
    end = m.sum(-1)
    inside = end < m.shape[1]
    rows = torch.arange(m.shape[0])[inside]
    return rewards.index_put((rows, end[inside]), scores[inside], accumulate=True) * m


def shadowed_log_ratio(
    logps,
    old_logps,
    ref_logps,
    advantages,
    completion_mask,
    beta=0.04,
):
    """The log-ratio to the sampler is overwritten by that of the KL before the policy loss.

    After huggingface/trl#6637.
    """
    m = completion_mask.bool()
    adv = torch.where(m, advantages, 0.0)
    log_ratio = torch.where(m, logps - old_logps, 0.0)
    if beta:
        log_ratio = torch.where(m, ref_logps - logps, 0.0)
    per_token_kl = log_ratio**2 / 2
    coef = log_ratio.exp()
    loss = -torch.min(coef * adv, coef.clamp(0.8, 1.2) * adv) + beta * per_token_kl
    return torch.where(m, loss, 0.0).sum() / m.sum()


def squared_in_the_coefficient(
    trainer_logprobs, inference_logprobs, ref_logprobs, advantages, loss_mask, kl_tau=0.01
):
    """The squared log-ratio stands inside the detached coefficient: a price, not a loss.

    After PrimeIntellect-ai/prime-rl#1697.
    """
    m = loss_mask.bool()
    ratio = torch.where(m, trainer_logprobs - inference_logprobs, 0.0).exp()
    k2 = 0.5 * torch.where(m, trainer_logprobs - ref_logprobs, 0.0) ** 2
    coeff = (torch.where(m, advantages, 0.0) - kl_tau * k2).detach()
    return -(coeff * ratio)[m].sum() / m.sum()


def reverse_for_forward(student_logits, teacher_logits, mask, alpha=0.5):
    """Distillation by the KL from the student where that from the teacher was documented.

    After paiml/aprender#2153.
    """
    m = mask.bool()
    p = student_logits.softmax(-1)
    kl = (p * (student_logits.log_softmax(-1) - teacher_logits.detach().log_softmax(-1))).sum(-1)
    return alpha * (kl * m).sum() / m.sum()


def live_truncated_weight(
    log_probs, rollout_log_probs, ref_log_probs, advantages, loss_masks, kl_loss_coef=0.01
):
    """The weight that corrects for the engine is of the current policy and is not detached, so
    that the ratio enters twice.

    After THUDM/slime#179.
    """
    m = loss_masks.bool()
    adv = torch.where(m, advantages, 0.0)
    gap = torch.where(m, log_probs - rollout_log_probs, 0.0)
    ratio = gap.exp()
    pg = -torch.min(ratio * adv, ratio.clamp(0.8, 1.28) * adv)
    pg = pg * gap.exp().clamp(max=2.0)
    kl = torch.where(m, log_probs - ref_log_probs, 0.0).square() / 2
    per_row = torch.where(m, pg + kl_loss_coef * kl, 0.0).sum(-1) / m.sum(-1)
    return per_row.mean()


def one_token_past_the_end(rewards, old_log_probs, ref_log_probs, action_mask, kl_ctl=0.1):
    """The sum over an answer ends one position late, in the padding.

    After deepspeedai/DeepSpeedExamples#672.
    """
    m = action_mask.bool()
    ends = m.sum(-1) + 1
    wide = torch.arange(m.shape[1]).expand_as(m) < ends.unsqueeze(-1)
    owed = torch.where(wide, -kl_ctl * (old_log_probs - ref_log_probs), 0.0)
    to_go = owed.flip(-1).cumsum(-1).flip(-1)
    return torch.where(m, rewards.unsqueeze(-1) + to_go, 0.0)


def maximised_in_the_objective(
    log_prob, old_log_prob, ref_log_prob, advantages, response_mask, kl_loss_coef=0.001
):
    """The objective has plus the KL, and the loss is its negative.

    After Unakar/Logic-RL#58.
    """
    m = response_mask.bool()
    adv = torch.where(m, advantages, 0.0)
    ratio = torch.where(m, log_prob - old_log_prob, 0.0).exp()
    gained = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
    kld = torch.where(m, log_prob - ref_log_prob, 0.0).square() / 2
    objective = torch.where(m, gained + kl_loss_coef * kld, 0.0).sum() / m.sum()
    return objective.neg()
