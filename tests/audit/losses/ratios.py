"""Losses whose KL is right and whose policy part is not."""

from __future__ import annotations

import torch


def _k2(logp, ref_logp):
    return 0.5 * (logp - ref_logp).square()


def ratio_to_the_reference(
    per_token_logps,
    ref_per_token_logps,
    old_per_token_logps,
    advantages,
    completion_mask,
    beta=0.04,
):
    """The ratio compares with the reference, not with the policy that sampled.

    After huggingface/trl#2837.
    """
    mask = completion_mask.bool()
    per_token_logps = per_token_logps.masked_fill(~mask, 0.0)
    ref_per_token_logps = ref_per_token_logps.masked_fill(~mask, 0.0)
    ratio = torch.exp(per_token_logps - ref_per_token_logps.detach())
    per_token_kl = _k2(per_token_logps, ref_per_token_logps)
    per_token_loss = -(ratio * advantages.unsqueeze(1) - beta * per_token_kl)
    return torch.where(mask, per_token_loss, 0.0).sum() / mask.sum()


def ppo_loss_of_an_objective(
    new_log_probs, old_log_probs, ref_log_probs, advantages, mask, kl_coef=0.05, eps=0.2
):
    """The objective that PPO maximises, minimised: the maximum of both, without the minus.

    After yandexdataschool/Practical_RL#248.
    """
    mask = mask.bool()
    new_log_probs, old_log_probs, ref_log_probs, advantages = (
        x.masked_fill(~mask, 0.0) for x in (new_log_probs, old_log_probs, ref_log_probs, advantages)
    )
    ratio = torch.exp(new_log_probs - old_log_probs)
    clipped = torch.clamp(ratio, 1 - eps, 1 + eps)
    surrogate = torch.max(ratio * advantages, clipped * advantages)
    loss = surrogate + kl_coef * _k2(new_log_probs, ref_log_probs)
    return torch.where(mask, loss, 0.0).sum() / mask.sum()


def clipped_before_the_advantage(
    log_prob, old_log_prob, ref_log_prob, advantages, response_mask, kl_loss_coef=0.01, eps=0.2
):
    """The minimum is taken of the ratios, before the advantage's sign can choose a side.

    After takuseno/ppo#3.
    """
    response_mask = response_mask.bool()
    log_prob, old_log_prob, ref_log_prob, advantages = (
        x.masked_fill(~response_mask, 0.0)
        for x in (log_prob, old_log_prob, ref_log_prob, advantages)
    )
    ratio = (log_prob - old_log_prob).exp()
    bounded = torch.minimum(ratio, ratio.clamp(1 - eps, 1 + eps))
    loss = -bounded * advantages + kl_loss_coef * _k2(log_prob, ref_log_prob)
    return torch.where(response_mask, loss, 0.0).sum() / response_mask.sum()


def advantages_on_the_wrong_axis(
    per_token_logps, old_per_token_logps, ref_per_token_logps, rewards, completion_mask, beta=0.01
):
    """One advantage a completion, [B], is broadcast along the tokens: row i reads the advantages
    of all rows, and the shapes fit only where B = T.

    After huggingface/trl#6095.
    """
    mask = completion_mask.bool()
    per_token_logps, old_per_token_logps, ref_per_token_logps = (
        x.masked_fill(~mask, 0.0)
        for x in (per_token_logps, old_per_token_logps, ref_per_token_logps)
    )
    advantages = rewards - rewards.mean()
    ratio = torch.exp(per_token_logps - old_per_token_logps)
    loss = -(ratio * advantages) + beta * _k2(per_token_logps, ref_per_token_logps)
    return torch.where(mask, loss, 0.0).sum() / mask.sum()
