"""KL penalties that are taken off rewards or advantages."""

from __future__ import annotations

import torch


def shaped_rewards(rewards, action_log_probs, ref_log_probs, action_mask, kl_coef=0.1):
    """The log-ratio to the reference is added to the reward: moving away is paid for.

    After nebuly-ai/optimate#298.
    """
    kl = torch.where(action_mask.bool(), action_log_probs - ref_log_probs, 0.0)
    return rewards.unsqueeze(-1) * _at_the_end(action_mask) + kl_coef * kl


def rewards_with_k3(token_level_scores, old_log_probs, ref_log_prob, response_mask, kl_coef=0.001):
    """k3, the estimator of the loss, taken off the reward, where only k1 has the KL's gradient.

    After NovaSky-AI/SkyRL#805 and huggingface/trl#3240.
    """
    delta = ref_log_prob - old_log_probs
    kld = torch.where(response_mask.bool(), torch.expm1(delta) - delta, 0.0)
    return token_level_scores - kl_coef * kld


def rewards_with_positive_part(rewards, logprobs, ref_logprobs, mask, kl_coef=0.05):
    """The log-ratio of each token is clamped at zero because a KL cannot be negative.

    After tatsu-lab/alpaca_farm#67.
    """
    kl = torch.clamp(logprobs - ref_logprobs, min=0.0)
    kl = torch.where(mask.bool(), kl, 0.0)
    return rewards.unsqueeze(-1) * _at_the_end(mask) - kl_coef * kl


def entropy_for_a_missing_reference(scores, logprobs, ref_logprobs, loss_mask, kl_ctl=0.1):
    """Without a reference model its log-probs are zeros; here they are zeros always, so that the
    penalty is the log-prob itself.

    After the default of areal-project/AReaL (``ref: None`` with ``kl_ctl`` at 0.1,
    ``trainer/ppo/actor.py`` at 4aef98d8).
    """
    ref_logprobs = torch.zeros_like(ref_logprobs)
    kl_rewards = -kl_ctl * torch.where(loss_mask.bool(), logprobs - ref_logprobs, 0.0)
    return kl_rewards + scores.unsqueeze(-1) * _at_the_end(loss_mask)


def returns_through_padding(token_rewards, logprobs, ref_logprobs, completion_mask, beta=0.1):
    """Returns are accumulated from the end of the tensor, over the KL of the padding.

    After natolambert/rlhf-book#216.
    """
    shaped = token_rewards - beta * (logprobs - ref_logprobs)
    returns = torch.zeros_like(shaped)
    running = torch.zeros_like(shaped[:, 0])
    for t in reversed(range(shaped.shape[1])):
        running = shaped[:, t] + running
        returns[:, t] = running
    return returns * completion_mask


def kl_to_go_not_accumulated(rewards, log_probs, ref_log_probs, mask, kl_coef=0.05):
    """The KL to go is assigned where it should be added up: a token pays for itself alone.

    After liziniu/ReMax#4.
    """
    mask = mask.bool()
    kl = torch.where(mask, log_probs - ref_log_probs, 0.0)
    advantages = torch.zeros_like(kl)
    cumulative_kl = torch.zeros_like(rewards)
    for t in reversed(range(kl.shape[1])):
        cumulative_kl = kl[:, t]
        advantages[:, t] = rewards - kl_coef * cumulative_kl
    return torch.where(mask, advantages, 0.0)


def kl_inside_the_group_std(rewards, log_probs, ref_log_probs, response_mask, kl_coef=0.1):
    """The KL is taken off before the group is divided by its deviation: where all answers are
    right or all wrong, only the KL is left, at a strength that no coefficient sets.

    After verl-project/verl#134, which asks why the KL is in the advantage.
    """
    kl = torch.where(response_mask.bool(), log_probs - ref_log_probs, 0.0).sum(-1)
    scores = rewards - kl_coef * kl
    advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
    return advantages.unsqueeze(-1) * response_mask


def penalised_twice(
    rewards, log_probs, old_log_probs, ref_log_probs, action_mask, init_kl_coef=0.01
):
    """One coefficient, a KL in the reward and a KL in the loss.

    After OpenRLHF/OpenRLHF#768 and verl-project/verl#211, whose authors feared it.
    """
    action_mask = action_mask.bool()
    kl = torch.where(action_mask, log_probs - ref_log_probs, 0.0)
    to_go = kl.detach().flip(-1).cumsum(-1).flip(-1)
    advantages = rewards.unsqueeze(-1) - init_kl_coef * to_go
    ratio = torch.where(action_mask, log_probs - old_log_probs, 0.0).exp()
    kl_loss = 0.5 * kl.square()
    loss = -ratio * advantages + init_kl_coef * kl_loss
    return torch.where(action_mask, loss, 0.0).sum(-1).mean()


def _at_the_end(mask):
    """1 at the last counted token of each row."""
    last = mask.sum(-1, keepdim=True) - 1
    return (torch.arange(mask.shape[1]) == last).to(torch.get_default_dtype())
