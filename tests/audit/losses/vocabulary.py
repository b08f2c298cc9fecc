"""Divergences over the whole vocabulary, from logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def reverse_kl_loss(student_logits, teacher_logits, labels_mask, kl_weight=1.0):
    """Called the reverse KL; ``F.kl_div`` takes the log of its *second* distribution first.

    After modelscope/twinkle#112 and huggingface/trl#4935.
    """
    student_log_probs = F.log_softmax(student_logits, dim=-1)
    teacher_log_probs = F.log_softmax(teacher_logits, dim=-1)
    kl = F.kl_div(student_log_probs, teacher_log_probs, reduction="none", log_target=True)
    kl = torch.where(labels_mask.bool(), kl.sum(-1), 0.0)
    return kl_weight * kl.sum() / labels_mask.sum()


def kl_of_scaled_logits(logits, ref_logits, completion_mask, beta=0.04, temperature=0.7):
    """The policy is divided by the sampling temperature, the reference is not.

    After huggingface/trl#3029, where the scaling was missing, with one of the two repaired.
    """
    logp = (logits / temperature).log_softmax(-1)
    ref_logp = ref_logits.log_softmax(-1)
    kl = (logp.exp() * (logp - ref_logp)).sum(-1)
    return beta * torch.where(completion_mask.bool(), kl, 0.0).sum() / completion_mask.sum()


def kl_over_time(logits, ref_logits, mask, kl_coef=0.1):
    """``log_softmax`` over dimension 1, which of [B, T, V] is time.

    After ctallec/world-models#10, where it ran over the batch.
    """
    logp = F.log_softmax(logits, dim=1)
    ref_logp = F.log_softmax(ref_logits, dim=1)
    kl = (logp.exp() * (logp - ref_logp)).sum(-1)
    return kl_coef * torch.where(mask.bool(), kl, 0.0).sum() / mask.sum()


def clipped_summands(student_logits, teacher_logits, mask, kl_coef=1.0, token_clip=0.05):
    """The summands of the vocabulary are clipped, not the token's divergence: the positive ones
    lose their gradient, the negative ones keep it.

    After siyan-zhao/OPSD#2.
    """
    logp, teacher = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    summands = logp.exp() * (logp - teacher)
    kl = summands.clamp(max=token_clip).sum(-1)
    return kl_coef * torch.where(mask.bool(), kl, 0.0).sum() / mask.sum()
