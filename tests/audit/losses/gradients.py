"""Losses whose KL or ratio looks right in the log and has no gradient, or another's."""

from __future__ import annotations

import torch


def grpo_kl_measured_without_gradient(
    new_logprobs, ref_logprobs, advantages, response_mask, beta=0.05
):
    """The KL is computed beside the reference, under ``no_grad``, and added to the loss.

    After allenai/open-instruct#530.
    """
    with torch.no_grad():
        ref_logprobs_diff = new_logprobs - ref_logprobs
        kl = torch.expm1(-ref_logprobs_diff) + ref_logprobs_diff
    ratio = torch.exp(new_logprobs - new_logprobs.detach())
    pg_losses = -advantages.unsqueeze(-1) * ratio
    per_token = torch.where(response_mask.bool(), pg_losses + beta * kl, 0.0)
    return per_token.sum() / response_mask.sum()


def distillation_loss(student_logits, teacher_logits, mask, temperature=1.0):
    """After a rename the teacher is compared with itself.

    After labmlai/annotated_deep_learning_paper_implementations#66.
    """
    targets = (teacher_logits / temperature).log_softmax(-1)
    outputs = (teacher_logits / temperature).log_softmax(-1)
    kl = (targets.exp() * (targets - outputs)).sum(-1)
    return torch.where(mask.bool(), kl, 0.0).sum() / mask.sum()


def ppo_kl_of_the_sampler(
    logprobs, old_logprobs, ref_logprobs, advantages, mask, kl_coef=0.1, cliprange=0.2
):
    """The KL loss reads the log-probs of the rollout, which are constants, for the actor's.

    After Tongyun1/from-minimind-to-more#10, where the notes had it so.
    """
    mask = mask.bool()
    logprobs, old_logprobs, ref_logprobs, advantages = (
        x.masked_fill(~mask, 0.0) for x in (logprobs, old_logprobs, ref_logprobs, advantages)
    )
    ratio = torch.exp(logprobs - old_logprobs)
    unclipped, clipped = ratio * advantages, ratio.clamp(1 - cliprange, 1 + cliprange) * advantages
    policy_loss = -torch.minimum(unclipped, clipped)
    kl = 0.5 * (old_logprobs - ref_logprobs) ** 2
    return torch.where(mask, policy_loss + kl_coef * kl, 0.0).sum() / mask.sum()


def grpo_loss_without_importance_sampling(
    token_log_probs,
    ref_token_log_probs,
    old_token_log_probs,
    advantages,
    length_mask,
    beta=0.1,
    epsilon=0.2,
    importance_sampling_level=None,
):
    """By default the log-ratio is a tensor of zeros: only the KL moves the weights.

    After Goekdeniz-Guelmez/mlx-lm-lora#50 and #55.
    """
    advantages = advantages.unsqueeze(-1)
    log_ratio = token_log_probs - old_token_log_probs
    if importance_sampling_level is None:
        log_ratio = torch.zeros_like(log_ratio)
    coef_1 = torch.exp(log_ratio)
    coef_2 = torch.clamp(coef_1, 1 - epsilon, 1 + epsilon)
    per_token_loss = -torch.minimum(coef_1 * advantages, coef_2 * advantages)
    ref_log_ratio = token_log_probs - ref_token_log_probs
    kl = torch.exp(token_log_probs - token_log_probs.detach()) * (
        torch.expm1(-ref_log_ratio) + ref_log_ratio
    )
    per_token_loss = torch.where(length_mask.bool(), per_token_loss + beta * kl, 0.0)
    return (per_token_loss.sum(-1) / length_mask.sum(-1)).mean()


def builtin_policy_loss(
    policy_logprobs, sampling_logprobs, ref_logprobs, advantages, loss_mask, kl_beta=0.05, eps=0.2
):
    """A fast path computes the KL for the log and leaves it out of what it returns.

    After fw-ai/cookbook#379 and THUDM/slime#397: the coefficient is read and has no effect.
    """
    loss_mask = loss_mask.bool()
    policy_logprobs, sampling_logprobs, ref_logprobs, advantages = (
        x.masked_fill(~loss_mask, 0.0)
        for x in (policy_logprobs, sampling_logprobs, ref_logprobs, advantages)
    )
    ratio = torch.exp(policy_logprobs - sampling_logprobs)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    kl_pen = kl_beta * (policy_logprobs - ref_logprobs)
    metrics = {"kl_pen": torch.where(loss_mask, kl_pen, 0.0).sum().item()}
    loss = -torch.where(loss_mask, surrogate, 0.0).sum() / loss_mask.sum()
    return loss, metrics


def straight_through_kl(logprob, ref_logprob, response_mask):
    """Meant to show k3 and to descend k2; ``detach`` stands on the wrong two of the three terms.

    After verl-project/verl#2953, which introduced the pair, with its halves exchanged.
    """
    log_ratio = torch.where(response_mask.bool(), logprob - ref_logprob, 0.0)
    shown = torch.expm1(-log_ratio) + log_ratio
    backward = 0.5 * log_ratio.square()
    kl = shown - shown.detach() + backward.detach()
    return kl.sum() / response_mask.sum()


def reinforce_with_a_frozen_ratio(
    log_probs, old_log_probs, ref_log_probs, action_mask, advantages, kl_coef=0.01
):
    """The log-probs were moved off the graph to save memory, with the ratio that needs them.

    After Goekdeniz-Guelmez/mlx-lm-lora#65: the forward pass lies outside what is differentiated.
    """
    frozen = log_probs.detach()
    ratio = (frozen - old_log_probs).exp()
    surrogate = ratio * advantages
    kl = 0.5 * (log_probs - ref_log_probs) ** 2
    per_token = torch.where(action_mask.bool(), kl_coef * kl - surrogate, 0.0)
    return (per_token.sum(dim=-1) / action_mask.sum(dim=-1)).mean()
