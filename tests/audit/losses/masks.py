"""Losses that count what they should not, or divide by it."""

from __future__ import annotations

import torch


def pg_and_kl_averaged_apart(
    new_logprobs, old_logprobs, ref_logprobs, advantages, response_mask, beta=0.04
):
    """The policy loss is averaged over its tokens, the KL over the whole tensor.

    After allenai/open-instruct#535.
    """
    ratio = torch.exp(new_logprobs - old_logprobs)
    pg_losses = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2))
    ref_logprobs_diff = new_logprobs - ref_logprobs
    kl = 0.5 * ref_logprobs_diff**2
    pg_loss = torch.where(response_mask.bool(), pg_losses, 0.0).sum() / response_mask.sum()
    return pg_loss + (beta * kl).mean()


def loss_averaged_over_the_width(
    log_probs, old_log_probs, ref_log_probs, advantages, loss_mask, kl_loss_coef=0.001
):
    """Masked positions are zeros, and the mean counts them.

    After NovaSky-AI/SkyRL#462: the KL's strength depends on the share of padding.
    """
    log_probs, old_log_probs, ref_log_probs, advantages = (
        x.masked_fill(~loss_mask.bool(), 0.0)
        for x in (log_probs, old_log_probs, ref_log_probs, advantages)
    )
    ratio = (log_probs - old_log_probs).exp()
    surr = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = 0.5 * (log_probs - ref_log_probs).square()
    loss = -surr + kl_loss_coef * kl
    return loss.mean()


def approx_kl_masked_late(log_probs, log_probs_base, loss_mask, kl_coef=0.001):
    """Masked after the exponential: 0 times ``inf`` or NaN is NaN.

    After NovaSky-AI/SkyRL#1633, NVIDIA-NeMo/RL#4120 and PaddlePaddle/PaddleNLP#10596.
    """
    kl_ratio = log_probs_base - log_probs
    weight = torch.exp(log_probs - log_probs.detach())
    kld = weight * (torch.exp(kl_ratio) - kl_ratio - 1)
    kld = kld * loss_mask
    return kl_coef * kld.sum() / loss_mask.sum()


def shifted_mask(logps, ref_logps, mask, beta=0.1):
    """The mask of the inputs on the log-probs of the targets, off by one.

    After Goekdeniz-Guelmez/mlx-lm-lora#80: the first token is dropped, the one after the last
    added.
    """
    input_mask = torch.nn.functional.pad(mask.bool(), (1, -1))
    kl = 0.5 * torch.where(input_mask, logps - ref_logps, 0.0).pow(2)
    return beta * kl.sum() / input_mask.sum().clamp(min=1)


def luspo_loss(per_token_logps, ref_per_token_logps, completion_mask, beta=0.04):
    """Every position is scaled by its completion's length instead of being masked.

    After huggingface/trl#6654.
    """
    per_token_kl = 0.5 * (per_token_logps - ref_per_token_logps).square()
    lengths = completion_mask.sum(-1, keepdim=True)
    return beta * (per_token_kl * lengths).mean()


def divided_by_tokens_twice(student_log_probs, teacher_log_probs, mask, kd_ratio=0.5):
    """Divided by the number of tokens where it is computed, and again where it is summed.

    After modelscope/easydistill#16.
    """
    mask = mask.bool()
    gap = torch.where(mask, student_log_probs - teacher_log_probs, 0.0)
    kl = 0.5 * gap.pow(2) / mask.sum()
    loss = kl.sum() / mask.sum()
    return kd_ratio * loss


def token_mean_in_micro_batches(
    logprobs, ref_logprobs, response_masks, beta=0.05, accumulation_steps=2
):
    """The mean over tokens is taken in each micro-batch, the micro-batches averaged.

    After allenai/open-instruct#1137: a token of a micro-batch with few weighs more.
    """
    response_masks = response_masks.bool()
    loss = logprobs.new_zeros(())
    chunks = zip(
        logprobs.chunk(accumulation_steps),
        ref_logprobs.chunk(accumulation_steps),
        response_masks.chunk(accumulation_steps),
        strict=True,
    )
    for logp, ref_logp, kept in chunks:
        kl = 0.5 * torch.where(kept, logp - ref_logp, 0.0).square()
        micro = kl.sum() / kept.sum().clamp(min=1)
        loss = loss + beta * micro / accumulation_steps
    return loss


def dapo_divided_by_accumulation(
    per_token_logps, ref_per_token_logps, completion_mask, beta=0.04, gradient_accumulation_steps=4
):
    """Divided by the tokens of the whole window, then once more by the steps in it.

    After modelscope/ms-swift#10117.
    """
    mask = completion_mask.bool()
    kl = 0.5 * torch.where(mask, per_token_logps - ref_per_token_logps, 0.0).square()
    num_items_in_batch = mask.sum()
    loss = beta * kl.sum() / num_items_in_batch
    return loss / gradient_accumulation_steps
