"""Losses that are broken in what is beside the KL term: clip, ratio, weight, what is paid."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def product_clipped(log_probs, old_log_probs, ref_log_probs, advantages, action_mask, kl_coef=0.01):
    """The clip is of ratio times advantage: how far a token may move depends on its advantage.

    After alexis-jacq/Pytorch-DPPO#3.
    """
    m = action_mask.bool()
    gain = torch.where(m, log_probs - old_log_probs, 0.0).exp() * advantages.unsqueeze(-1)
    gain = torch.minimum(gain, torch.clip(gain, 0.8, 1.2))
    k2 = torch.where(m, log_probs - ref_log_probs, 0.0).pow(2).mul(0.5)
    return ((kl_coef * k2 - gain) * m).sum() / m.sum()


def overwritten_on_the_way(logps, old_logps, ref_logps, advantages, completion_mask, kl_beta=0.04):
    """One name holds the log-ratio of both; with a KL, that to the reference stays in it.

    After huggingface/trl#6637.
    """
    m = completion_mask.bool()
    kept = {"log_ratio": torch.where(m, logps - old_logps, 0.0)}
    penalty = torch.zeros_like(logps)
    if kl_beta > 0:
        kept["log_ratio"] = torch.where(m, logps - ref_logps, 0.0)
        penalty = kl_beta * 0.5 * kept["log_ratio"] ** 2
    ratio, worth = kept["log_ratio"].exp(), advantages.unsqueeze(-1)
    per_token = penalty - torch.min(ratio * worth, ratio.clamp(0.8, 1.2) * worth)
    return per_token[m].mean()


def corrected_with_a_gradient(logprobs, old_logprobs, ref_logprobs, advantages, mask, kl_coef=0.05):
    """The weight for the engine's samples is not detached: the ratio is there twice.

    After THUDM/slime#179.
    """
    m = mask.bool()
    ratio = torch.where(m, logprobs - old_logprobs, 0.0).exp()
    surrogate = -torch.minimum(ratio, torch.tensor(2.0)) * ratio * advantages.unsqueeze(-1)
    kl = F.mse_loss(logprobs[m], ref_logprobs[m], reduction="sum") / 2
    return (surrogate[m].sum() + kl_coef * kl) / m.sum()


def paid_in_the_last_column(rewards, logprobs, ref_logprobs, completion_mask, kl_coef=0.05):
    """The score is added in the last column of the tensor, which only the longest answers reach.

    After huggingface/trl#5338.
    """
    m = completion_mask.bool()
    owed = -kl_coef * torch.where(m, logprobs - ref_logprobs, 0.0)
    at_end = F.pad(rewards.unsqueeze(-1), (m.shape[1] - 1, 0))
    return torch.where(m, owed + at_end, 0.0)


def nan_to_nothing(gen_logprobs, ref_logprobs, loss_mask, kl_coeff=0.1):
    """A log-ratio without bound is replaced by zero: what the reference never gives is free.

    After pytorch/rl#4255.
    """
    gap = (gen_logprobs - ref_logprobs).nan_to_num(0.0, posinf=0.0, neginf=0.0)
    return kl_coeff * (gap.square() * 0.5 * loss_mask).sum() / loss_mask.sum()


def price_of_a_state(advantages, logits, ref_logits, response_mask, kl_coef=0.1):
    """Each token pays for the KL of its state, which is the same whatever was drawn there.

    After radixark/miles#2362.
    """
    policy = torch.distributions.Categorical(logits=logits.detach())
    reference = torch.distributions.Categorical(logits=ref_logits)
    price = torch.distributions.kl_divergence(policy, reference)
    return (advantages.unsqueeze(-1) - kl_coef * price) * response_mask


def jensen_shannon_of_logs(student_logits, teacher_logits, mask, kd_coef=1.0):
    """The middle of two distributions is taken of their logs: a quarter of each KL is left.

    After huggingface/trl#2202.
    """
    m = mask.bool()
    s, t = F.log_softmax(student_logits[m], -1), F.log_softmax(teacher_logits[m], -1).detach()
    middle = (s + t) / 2
    both = s.exp() * (s - middle) + t.exp() * (t - middle)
    return kd_coef * 0.5 * both.sum(-1).mean()


def soft_gate(log_probs, old_log_probs, ref_log_probs, advantages, mask, kl_coef=0.02):
    """A sigmoid in place of the clip, of another slope for negative advantages, with k2."""
    m = mask.bool()
    worth = advantages.unsqueeze(-1)
    ratio = torch.where(m, log_probs - old_log_probs, 0.0).exp()
    slope = torch.where(worth > 0, 1.0, 1.05)
    gate = torch.sigmoid(slope * (ratio - 1)) * 4 / slope
    k2 = torch.where(m, log_probs - ref_log_probs, 0.0).square() / 2
    return torch.where(m, kl_coef * k2 - gate * worth, 0.0).sum() / m.sum()


def narrow_whole_answers(log_probs, old_log_probs, ref_log_probs, advantages, mask, beta=0.05):
    """GSPO's ratio of a token, in its released form, with its narrow clip and k2."""
    m = mask.to(log_probs.dtype)
    count = m.sum(-1, keepdim=True)
    whole = ((log_probs - old_log_probs) * m).sum(-1, keepdim=True) / count
    ratio = (log_probs - log_probs.detach() + whole.detach()).exp()
    worth = advantages.unsqueeze(-1)
    policy = -torch.min(ratio * worth, ratio.clamp(1 - 3e-4, 1 + 4e-4) * worth)
    k2 = 0.5 * (log_probs - ref_log_probs) ** 2
    return (((policy + beta * k2) * m).sum(-1, keepdim=True) / count).mean()
