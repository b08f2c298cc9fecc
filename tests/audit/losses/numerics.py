"""Losses that are right near the reference and lose their gradient away from it."""

from __future__ import annotations

import torch


def clamped_kl(log_probs, ref_log_probs, response_mask, kl_coef=0.01, kl_clamp=1.0):
    """The value is clamped from above, and with it the gradient of whatever drifted furthest.

    After rlresearch/dr-tulu#20.
    """
    delta = torch.where(response_mask.bool(), ref_log_probs - log_probs, 0.0)
    weight = torch.exp(log_probs - log_probs.detach())
    kl = weight * (torch.expm1(delta) - delta)
    return kl_coef * (kl * response_mask).clamp(max=kl_clamp).sum() / response_mask.sum()


def clamped_log_ratio(per_token_logps, ref_per_token_logps, completion_mask, beta=0.04):
    """The log-ratio is clamped at one nat, beyond which nothing pulls a token back.

    After tulerfeng/Video-R1#67, where 10 was tried against 1.
    """
    mask = completion_mask.bool()
    x = torch.where(mask, ref_per_token_logps - per_token_logps, 0.0)
    x_clamped = torch.clamp(x, min=-1, max=1)
    per_token_kl = torch.exp(x_clamped) - x_clamped - 1
    return beta * per_token_kl.sum() / mask.sum()


def filtered_by_multiplication(
    log_probs,
    old_log_probs,
    ref_log_probs,
    advantages,
    action_mask,
    kl_coef=0.01,
    bounds=(0.5, 5.0),
):
    """A ratio out of bounds is multiplied by zero, also where it has overflowed to ``inf``.

    After OpenRLHF/OpenRLHF#1314 and PrimeIntellect-ai/prime-rl#2972.
    """
    low, high = bounds
    mask = action_mask.bool()
    log_probs, old_log_probs, ref_log_probs, advantages = (
        x.masked_fill(~mask, 0.0) for x in (log_probs, old_log_probs, ref_log_probs, advantages)
    )
    ratio = torch.exp(log_probs - old_log_probs)
    keep = ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
    policy_loss = -(ratio * keep) * advantages
    kl = 0.5 * (log_probs - ref_log_probs).square()
    loss = torch.where(mask, policy_loss + kl_coef * kl, 0.0)
    return loss.sum() / mask.sum()


def documented_estimator(logprob, ref_logprob, response_mask, kl_penalty="k3+", kl_coef=0.001):
    """The documentation offers ``k3+``, the branch that would compute it was never written.

    After verl-project/verl#6058.
    """
    log_ratio = logprob - ref_logprob
    if kl_penalty in ("kl", "k1"):
        kl = log_ratio
    elif kl_penalty in ("mse", "k2"):
        kl = 0.5 * log_ratio.square()
    elif kl_penalty in ("low_var_kl", "k3"):
        kl = torch.expm1(-log_ratio) + log_ratio
    else:
        raise NotImplementedError(f"kl_penalty {kl_penalty}")
    return kl_coef * torch.where(response_mask.bool(), kl, 0.0).sum() / response_mask.sum()
