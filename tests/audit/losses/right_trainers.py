"""Right losses, each with the argument names and the habits of a trainer."""

from __future__ import annotations

from types import SimpleNamespace

import torch


def trl_dapo_loss(
    per_token_logps,
    old_per_token_logps,
    ref_per_token_logps,
    advantages,
    completion_mask,
    beta=0.04,
    epsilon_low=0.2,
    epsilon_high=0.28,
):
    """k3 times the live ratio, mean over the batch's tokens."""
    mask = completion_mask.bool()
    advantages = advantages.unsqueeze(1)
    log_ratio = torch.where(mask, per_token_logps - old_per_token_logps, 0.0)
    coef_1 = torch.exp(log_ratio)
    coef_2 = torch.clamp(coef_1, 1 - epsilon_low, 1 + epsilon_high)
    per_token_loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
    delta = torch.where(mask, ref_per_token_logps - per_token_logps, 0.0)
    per_token_loss = per_token_loss + beta * coef_1 * (torch.expm1(delta) - delta)
    return per_token_loss.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def verl_actor_loss(
    old_log_prob, log_prob, ref_log_prob, advantages, response_mask, kl_loss_coef=0.001
):
    """k2 on fresh samples, returned with its metrics; sequence means, then their mean."""
    kept = response_mask.bool()
    advantages = advantages.masked_fill(~kept, 0.0)
    negative_approx_kl = torch.where(kept, log_prob - old_log_prob, 0.0).clamp(-20.0, 20.0)
    ratio = torch.exp(negative_approx_kl)
    pg_losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    kld = 0.5 * torch.where(kept, log_prob - ref_log_prob, 0.0).square()

    def agg(x):
        return (torch.where(kept, x, 0.0).sum(-1) / kept.sum(-1).clamp(min=1)).mean()

    pg_loss, kl_loss = agg(pg_losses), agg(kld)
    metrics = {"actor/kl_loss": kl_loss.detach().item(), "actor/pg_loss": pg_loss.detach().item()}
    return pg_loss + kl_loss_coef * kl_loss, metrics


class PolicyLoss:
    """OpenRLHF's shape: a class that is called; the value of k3 with the gradient of k2 times the
    detached ratio to the sampler."""

    def __init__(self, clip_eps=0.2, kl_coef=0.01):
        self.clip_eps = clip_eps
        self.kl_coef = kl_coef

    def __call__(self, log_probs, old_log_probs, ref_log_probs, advantages, action_mask):
        mask = action_mask.bool()
        advantages = torch.where(mask, advantages, 0.0)
        log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0)
        ratio = log_ratio.exp()
        surr1 = ratio * advantages
        surr2 = ratio.clamp(1 - self.clip_eps, 1 + self.clip_eps) * advantages
        delta = torch.where(mask, ref_log_probs - log_probs, 0.0)
        value = torch.expm1(delta) - delta
        gradient = ratio.detach() * 0.5 * delta.square()
        kl = value.detach() + gradient - gradient.detach()
        loss = torch.where(mask, self.kl_coef * kl - torch.min(surr1, surr2), 0.0)
        return loss.sum() / mask.sum().clamp(min=1)


def make_policy_loss(kl_coef=0.01):
    """OpenRLHF's shape: a class that is called; the value of k3 with the gradient of k2."""
    return PolicyLoss(kl_coef=kl_coef)


def nemo_rl_kl(
    curr_logprobs, prev_logprobs, reference_policy_logprobs, token_mask, sample_mask=None,
    reference_policy_kl_penalty=0.01,
):  # fmt: skip
    """k3 with a live ratio to the sampler, over the valid tokens of the valid samples."""
    mask = token_mask.bool()
    if sample_mask is not None:
        mask = mask & sample_mask.bool().unsqueeze(-1)
    logr = torch.where(mask, reference_policy_logprobs - curr_logprobs, 0.0)
    importance = torch.where(mask, curr_logprobs - prev_logprobs, 0.0).exp()
    kl = importance * (torch.expm1(logr) - logr)
    return reference_policy_kl_penalty * kl.sum() / mask.sum().clamp(min=1)


def open_instruct_estimate(new_logprobs, vllm_logprobs, ref_logprobs, response_masks, beta=0.05):
    """The live ratio times k1, log-ratio bounded at 40, mean over tokens."""
    response_masks = response_masks.bool()
    ref_diff = torch.where(response_masks, new_logprobs - ref_logprobs, 0.0).clamp(-40.0, 40.0)
    ratio = torch.where(response_masks, new_logprobs - vllm_logprobs, 0.0).exp()
    return beta * (ratio * ref_diff).sum() / response_masks.sum()


def slime_policy_loss(
    log_probs, old_log_probs, ref_log_probs, advantages, loss_masks, kl_loss_coef
):
    """``--use-unbiased-kl`` with k1; sums over tokens, mean over samples; a dictionary."""
    m = loss_masks.bool()
    advantages = torch.where(m, advantages, 0.0)
    ppo_kl = torch.where(m, old_log_probs - log_probs, 0.0)
    ratio = (-ppo_kl).exp()
    pg = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.28) * advantages)
    kl = ratio * torch.where(m, log_probs - ref_log_probs, 0.0)
    per_sample = torch.where(m, pg + kl_loss_coef * kl, 0.0).sum(-1)
    return {"loss": per_sample.mean(), "ppo_kl": ppo_kl.detach().mean(), "kl": kl.detach().mean()}


def prime_rl_loss(
    trainer_logprobs, inference_logprobs, ref_logprobs, advantages, loss_mask, kl_tau=1e-3
):
    """The detached log-ratio to the reference times the live ratio, on sums over all tokens."""
    loss_mask = loss_mask.bool()
    advantages = advantages.masked_fill(~loss_mask, 0.0)
    log_importance = torch.where(loss_mask, trainer_logprobs - inference_logprobs, 0.0)
    importance_ratio = torch.exp(log_importance)
    distance = torch.where(loss_mask, trainer_logprobs - ref_logprobs, 0.0).detach()
    loss = -(importance_ratio * advantages) + kl_tau * distance * importance_ratio
    loss = loss[loss_mask].sum() / loss_mask.sum()
    return SimpleNamespace(loss=loss, metrics={"ratio": importance_ratio[loss_mask].mean()}).loss


class SimpleGRPOLoss(torch.nn.Module):
    """torchforge's shape: a module; the ratio is one with a gradient, which on fresh samples is
    right (meta-pytorch/torchforge#571 took it for a fault)."""

    def __init__(self, beta=0.1):
        super().__init__()
        self.beta = beta

    def forward(self, logprobs, ref_logprobs, advantages, padding_mask):
        kept = padding_mask.bool()
        logprobs, ref_logprobs = (
            torch.where(kept, x, torch.zeros_like(x)) for x in (logprobs, ref_logprobs)
        )
        per_token_policy_loss = torch.exp(logprobs - logprobs.detach()) * advantages.unsqueeze(1)
        kl = 0.5 * (ref_logprobs - logprobs) ** 2
        per_token_loss = -(per_token_policy_loss - self.beta * kl) * kept
        return (per_token_loss.sum(dim=1) / kept.sum(dim=1).clamp(min=1.0)).mean()


def make_simple_grpo_loss(beta=0.1):
    """torchforge's shape: a module; the ratio is one with a gradient."""
    return SimpleGRPOLoss(beta)
