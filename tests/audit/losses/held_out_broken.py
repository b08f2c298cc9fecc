"""Broken losses that no rule of the audit was written by."""

from __future__ import annotations

import torch


def product_of_sums(
    trainer_logprobs, inference_logprobs, ref_logprobs, advantages, loss_mask, kl_tau=1e-3
):
    """The detached sum of all log-ratios times the sum of all ratios: a token pays for the KL of
    every other row.

    After PrimeIntellect-ai/prime-rl#1391.
    """
    keep = loss_mask.bool()
    log_importance_ratio = (trainer_logprobs - inference_logprobs)[keep]
    importance_ratio = log_importance_ratio.exp()
    pg = -(importance_ratio * advantages[keep]).sum()
    to_ref = (trainer_logprobs - ref_logprobs)[keep]
    kl = (to_ref.sum().detach() * importance_ratio).sum()
    return (pg + kl_tau * kl) / keep.sum()


def reference_one_token_late(logprobs, ref_logprobs, response_mask, kl_coef=0.05):
    """The reference's log-probs are sliced one position off from the policy's.

    After CarperAI/trlx#218.
    """
    logp, ref_logp, mask = logprobs[:, 1:], ref_logprobs[:, :-1], response_mask[:, 1:].bool()
    gap = torch.where(mask, logp - ref_logp, 0.0)
    return kl_coef * 0.5 * gap.square().sum() / mask.sum().clamp(min=1)


def masked_kl_div(logits, ref_logits, mask, kl_div_loss_weight=0.1):
    """A reverse KL with its arguments in each other's place.

    After lucidrains/PaLM-rlhf-pytorch#43.
    """
    probs, ref_probs = logits.softmax(-1), ref_logits.softmax(-1)
    kl = (ref_probs * (ref_probs.clamp(min=1e-20).log() - probs.clamp(min=1e-20).log())).sum(-1)
    kl = kl.masked_fill(~mask.bool(), 0.0)
    return kl_div_loss_weight * (kl.sum(-1) / mask.sum(-1)).mean()


def centred_by_column(
    log_probs, old_log_probs, ref_log_probs, advantages, completion_mask, beta=0.04
):
    """The advantages are centred position by position, padding included.

    After MakazhanAlpamys/Soup#723.
    """
    mask = completion_mask.bool()
    advantages = advantages - advantages.mean(dim=0, keepdim=True)
    ratio = torch.where(mask, log_probs - old_log_probs, 0.0).exp()
    pg = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = 0.5 * torch.where(mask, log_probs - ref_log_probs, 0.0).square()
    return torch.where(mask, pg + beta * kl, 0.0).sum() / mask.sum()


def kl_of_summed_log_probs(log_probs, ref_log_probs, mask, beta=0.01):
    """k3 of the sum of a completion's log-probs where each token's was meant.

    After walkinglabs/hands-on-modern-rl#75.
    """
    m = mask.bool()
    seq = log_probs.masked_fill(~m, 0.0).sum(-1)
    ref_seq = ref_log_probs.masked_fill(~m, 0.0).sum(-1)
    diff = ref_seq - seq
    return beta * (diff.exp() - diff - 1).mean()


def rloo_with_k3(rewards, old_logprobs, ref_logprobs, completion_mask, beta=0.05):
    """k3 for k1 in the reward of leave-one-out, because its variance is lower.

    After huggingface/trl#7096.
    """
    m = completion_mask.bool()
    x = torch.where(m, ref_logprobs - old_logprobs, 0.0)
    shaped = rewards - beta * (x.exp() - x - 1).sum(-1)
    n = shaped.numel()
    return shaped - (shaped.sum() - shaped) / max(n - 1, 1)


def empty_rows_divide_by_zero(
    per_token_logps, ref_per_token_logps, advantages, completion_mask, beta=0.04
):
    """A row without a counted token is divided by zero.

    After fla-org/flash-linear-attention#189.
    """
    m = completion_mask.bool()
    logp = per_token_logps.masked_fill(~m, 0.0)
    ref = ref_per_token_logps.masked_fill(~m, 0.0)
    pg = -torch.exp(logp - logp.detach()) * advantages.unsqueeze(1)
    loss = torch.where(m, pg + beta * 0.5 * (logp - ref) ** 2, 0.0)
    return (loss.sum(1) / completion_mask.sum(1)).mean()


def loss_summed_over_the_batch(log_probs, ref_log_probs, mask, beta=0.01):
    """The sum of all tokens, with no divisor: the KL grows with the batch.

    After huggingface/trl#2608.
    """
    gap = torch.where(mask.bool(), log_probs - ref_log_probs, 0.0)
    return beta * 0.5 * (gap**2).sum()


def fsdp_kl(ref_logprobs, logprobs, loss_mask, kl_beta=0.001):
    """``low_var_kl`` with its clamps, called with the reference where the policy belongs.

    After RLinf/RLinf#1400.
    """
    keep = loss_mask.bool()

    def low_var_kl(logp, ref_logp):
        kl = torch.clamp(ref_logp - logp, min=-20, max=20)
        return torch.clamp(torch.exp(kl) - kl - 1, min=-10, max=10)

    kl = low_var_kl(ref_logprobs.masked_fill(~keep, 0.0), logprobs.masked_fill(~keep, 0.0))
    return kl_beta * kl.sum() / keep.sum()


def one_length_for_all(per_token_logps, ref_per_token_logps, completion_mask, beta=0.04):
    """The longest completion's length masks every row.

    After modelscope/ms-swift#3069.
    """
    logits_to_keep = int(completion_mask.sum(-1).max())
    logp, ref = per_token_logps[:, :logits_to_keep], ref_per_token_logps[:, :logits_to_keep]
    kl = 0.5 * (logp - ref).square()
    return beta * kl.sum(-1).div(logits_to_keep).mean()


def offset_ratio(
    trainer_logprobs, inference_logprobs, ref_logprobs, advantages, loss_mask, kl_coef=0.01
):
    """Trainer and engine label a token one position apart, so the ratio compares two tokens.

    After PrimeIntellect-ai/prime-rl#1525.
    """
    keep = loss_mask.bool()
    trainer, inference, ref = (
        torch.where(keep, x, 0.0) for x in (trainer_logprobs, inference_logprobs, ref_logprobs)
    )
    ratio = torch.exp(trainer - torch.roll(inference, 1, dims=-1))
    advantages = torch.where(keep, advantages, 0.0)
    pg = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = pg + kl_coef * 0.5 * (trainer - ref).square()
    return torch.where(keep, loss, 0.0).sum() / keep.sum()


def gdpo_advantages(rewards, logprobs, ref_logprobs, response_mask, kl_coef=0.05):
    """The KL is taken off a tensor of rewards; the advantages are made of another.

    After NovaSky-AI/SkyRL#2104.
    """
    m = response_mask.bool()
    shaped = rewards - kl_coef * torch.where(m, logprobs - ref_logprobs, 0.0).sum(-1)
    metrics = shaped.mean().item()
    del metrics
    advantages = rewards - rewards.mean()
    return torch.where(m, advantages.unsqueeze(-1), 0.0)


def kl_curve_that_does_not_move(log_prob, ref_log_prob, response_mask, kl_coef=0.1):
    """The KL is computed on detached predictions.

    After X-GenGroup/Flow-Factory#122.
    """
    m = response_mask.bool()
    gap = torch.where(m, log_prob.detach() - ref_log_prob, 0.0)
    kl = 0.5 * gap.square() + 0.0 * torch.where(m, log_prob, 0.0)
    return kl_coef * kl.sum() / m.sum()


def kl_that_raises_what_was_drawn(target_logp, prior_logp, mask, kl_cost=0.1):
    """Prior minus policy: on the drawn actions it raises their probability.

    After google-research/seed_rl#81.
    """
    m = mask.bool()
    return kl_cost * (prior_logp - target_logp)[m].mean()


def whitened_over_padding(log_probs, old_log_probs, ref_log_probs, advantages, mask, kl_coef=0.01):
    """Advantages are whitened over the whole tensor, padding included.

    After natolambert/rlhf-book#216, which masks what was not masked.
    """
    m = mask.bool()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = torch.where(m, log_probs - old_log_probs, 0.0).exp()
    pg = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = 0.5 * torch.where(m, log_probs - ref_log_probs, 0.0).square()
    return torch.where(m, pg + kl_coef * kl, 0.0).sum() / m.sum()
