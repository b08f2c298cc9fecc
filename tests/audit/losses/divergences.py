"""KL terms that are another term than their name says."""

from __future__ import annotations

import torch


def squared_log_ratio_penalty(logprobs_current, logprobs_ref, completion_mask, kl_coef=0.04):
    """A mean squared log-ratio called KL: twice k2, so twice the coefficient that was asked for.

    After one-covenant/grail#42.
    """
    log_ratio = logprobs_current - logprobs_ref
    kl = (log_ratio.pow(2) * completion_mask).sum() / completion_mask.sum()
    return kl_coef * kl


def reference_minus_current(logprobs_current, logprobs_ref, completion_mask, kl_coef=0.04):
    """The repair of the above: minus k1, which as a loss descends nothing and reads negative.

    After one-covenant/grail#42.
    """
    kl_div = logprobs_ref - logprobs_current
    kl_div = torch.where(completion_mask.bool(), kl_div, torch.zeros_like(kl_div))
    return kl_coef * kl_div.sum() / completion_mask.sum()


def log_ratio_as_loss(
    curr_logprobs, old_logprobs, reference_logprobs, loss_mask, loss_weights, kl_coef=0.1
):
    """The log-ratio to the reference as a loss: right as a value, its gradient knows no reference.

    After marin-community/marin#1708.
    """
    loss_mask = loss_mask.bool()
    curr_logprobs, old_logprobs, reference_logprobs, loss_weights = (
        torch.where(loss_mask, x, 0.0)
        for x in (curr_logprobs, old_logprobs, reference_logprobs, loss_weights)
    )
    ratio = torch.exp(curr_logprobs - old_logprobs)
    reinforce = -(ratio * loss_weights)
    kl = curr_logprobs - reference_logprobs
    total = torch.where(loss_mask, reinforce + kl_coef * kl, 0.0)
    return total.sum() / loss_mask.sum()


def exchanged_k3(token_log_probs, ref_token_log_probs, length_mask, advantages, beta=0.1):
    """k3 with policy and reference in each other's place.

    After ml-explore/mlx-examples#1233; the same exchange stood in RLinf (RLinf/RLinf#1400).
    """
    kl_div = (torch.exp(token_log_probs - ref_token_log_probs) - 1) - (
        token_log_probs - ref_token_log_probs
    )
    policy_ratio = torch.exp(token_log_probs - token_log_probs.detach())
    per_token_loss = -(policy_ratio * advantages.unsqueeze(1) - beta * kl_div)
    per_token_loss = per_token_loss.masked_fill(~length_mask.bool(), 0.0)
    return per_token_loss.sum() / length_mask.sum()


def kl_loss_subtracted(
    log_prob, old_log_prob, ref_log_prob, advantages, response_mask, kl_loss_coef=0.001
):
    """The KL is subtracted from a loss that is minimised.

    After mll-lab-nu/RAGEN#58 and Unakar/Logic-RL#58, both on one commit of verl.
    """
    response_mask = response_mask.bool()
    log_prob, old_log_prob, ref_log_prob, advantages = (
        x.masked_fill(~response_mask, 0.0)
        for x in (log_prob, old_log_prob, ref_log_prob, advantages)
    )
    ratio = torch.exp(log_prob - old_log_prob)
    pg_losses = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    pg_loss = torch.where(response_mask, pg_losses, 0.0).sum() / response_mask.sum()
    kld = 0.5 * (log_prob - ref_log_prob).square()
    kl_loss = torch.where(response_mask, kld, 0.0).sum() / response_mask.sum()
    return pg_loss - kl_loss * kl_loss_coef


def calculate_kl_with_score_term(
    curr_logprobs, prev_logprobs, reference_policy_logprobs, token_mask, kl_penalty=0.01
):
    """k2 times a ratio that carries its gradient: right for k3, for k2 the gradient of E[k2].

    After NVIDIA-NeMo/RL#2506, which multiplies every estimator alike.
    """
    logr = torch.where(token_mask.bool(), reference_policy_logprobs - curr_logprobs, 0.0)
    kl = 0.5 * logr**2
    importance = torch.exp(curr_logprobs - curr_logprobs.detach())
    return kl_penalty * (importance * kl * token_mask).sum() / token_mask.sum()


def gspo_with_corrected_kl(
    per_token_logps,
    old_per_token_logps,
    ref_per_token_logps,
    advantages,
    completion_mask,
    beta=0.04,
    epsilon=3e-4,
):
    """The mean ratio of a completion, meant for its advantage, multiplies the KL of each token.

    After huggingface/trl#6586.
    """
    mask = completion_mask.bool()
    advantages = advantages.unsqueeze(1)
    log_ratio = torch.where(mask, per_token_logps - old_per_token_logps, 0.0)
    log_weights = (log_ratio.sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    coef_1 = torch.exp(log_weights)
    coef_2 = torch.clamp(coef_1, 1 - epsilon, 1 + epsilon)
    per_token_loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
    delta = torch.where(mask, ref_per_token_logps - per_token_logps, 0.0)
    per_token_kl = (torch.expm1(delta) - delta) * coef_1
    per_token_loss = torch.where(mask, per_token_loss + beta * per_token_kl, 0.0)
    return (per_token_loss.sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


def kl_to_the_sampler(
    logprobs, old_logprobs, ref_logprobs, advantages, mask, kl_coef=0.05, clip=0.2
):
    """An approximate KL to the sampler under the name of the KL to the reference.

    After huggingface/trl#2837 and huggingface/trl#3025, where the two were taken for each other.
    """
    mask = mask.bool()
    advantages = advantages.masked_fill(~mask, 0.0)
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    policy = -torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    kl = ratio * log_ratio
    return torch.where(mask, policy + kl_coef * kl, 0.0).sum() / mask.sum()


def probability_weighted_kl(log_probs, ref_log_probs, response_mask, kl_coef=0.02):
    """``F.kl_div`` on the log-probs of the sampled tokens: it weighs them with their probability
    under the reference once more.

    After the question of OpenLMLab/MOSS-RLHF#35 what a distribution's KL is on one token.
    """
    kl = torch.nn.functional.kl_div(log_probs, ref_log_probs, reduction="none", log_target=True)
    kl = torch.where(response_mask.bool(), kl, 0.0)
    return kl_coef * (kl.sum(-1) / response_mask.sum(-1)).mean()
