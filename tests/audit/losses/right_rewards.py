"""Right KL penalties on the side of the reward."""

from __future__ import annotations

import torch


def token_rewards(reward_score, log_probs, ref_log_probs, response_mask, kl_coef=0.05):
    """InstructGPT's: minus beta times k1 at each token, the score at the last one."""
    kept = response_mask.bool()
    kl = torch.where(kept, log_probs - ref_log_probs, 0.0)
    token_level_rewards = -kl_coef * kl
    last = kept.long().cumsum(-1).argmax(-1)
    rows = torch.arange(len(last))
    bonus = torch.zeros_like(kl).index_put((rows, last), reward_score.to(kl.dtype))
    return token_level_rewards + bonus


def rloo_advantages(rewards, logprobs, ref_logprobs, completion_mask, beta=0.05):
    """The KL of the completion off its reward, then leave-one-out over the batch."""
    kept = completion_mask.bool()
    kl = torch.where(kept, logprobs - ref_logprobs, 0.0).sum(1)
    shaped = rewards - beta * kl
    count = shaped.shape[0]
    if count == 1:
        return shaped
    baseline = (shaped.sum() - shaped) / (count - 1)
    return shaped - baseline


def advantages_with_kl_to_go(advantages, old_log_probs, ref_log_probs, action_mask, kl_coef=0.01):
    """OpenRLHF's order: normalised advantages, then the KL as a return, reversed cumulative sum."""
    kept = action_mask.bool()
    kl = torch.where(kept, old_log_probs - ref_log_probs, 0.0)
    to_go = torch.flip(torch.cumsum(torch.flip(kl, [-1]), -1), [-1])
    return torch.where(kept, advantages - kl_coef * to_go, 0.0)
