"""Right losses of the fifth set held out, by somebody who had not seen the audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


def sequence_kl(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    position_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    beta: float = 0.01,
) -> torch.Tensor:
    """beta times the mean over answers of half the squared log-ratio of the whole answer (on-policy
    samples).

    Its gradient is the score of the answer times its log-ratio: the reverse KL of the two
    distributions over answers. All tensors are flat, [N]; position_ids starts again at 0 with each
    answer; loss_mask drops tokens that the policy did not write.
    """
    answer = (position_ids == 0).long().cumsum(0) - 1
    n_answers = int(answer[-1]) + 1
    gap = (logps - ref_logps.detach()).masked_fill(loss_mask == 0, 0.0)
    per_answer = gap.new_zeros(n_answers).index_add(0, answer, gap)
    return beta * 0.5 * per_answer.square().mean()


class StudentTeacherLoss:
    """distill_coef times KL(student || teacher) at every position whose label is not -100.

    F.kl_div(input, target) computes KL(target || input), so that the teacher is the input and the
    student the target.
    """

    ignore_index = -100

    def __init__(self, distill_coef: float = 1.0):
        self.distill_coef = distill_coef

    def __call__(self, student_logits, teacher_logits, labels, num_items_in_batch=None):
        keep = labels != self.ignore_index
        student = F.log_softmax(student_logits[keep], dim=-1)
        teacher = F.log_softmax(teacher_logits[keep].detach(), dim=-1)
        kl = F.kl_div(teacher, student, reduction="sum", log_target=True)
        count = keep.sum() if num_items_in_batch is None else num_items_in_batch
        return self.distill_coef * kl / count


def soft_label_loss(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    response_mask: torch.Tensor,
    weight: float = 1.0,
    num_tokens: float | None = None,
) -> torch.Tensor:
    """weight times the cross-entropy of the student under the teacher's probabilities, over
    num_tokens.

    The gradient is that of KL(teacher || student); the value is above it by the teacher's entropy,
    which is constant. student_logits, teacher_logits: [B, T, V]; response_mask: [B, T]; num_tokens
    defaults to the tokens of the call.
    """
    index = response_mask.flatten().nonzero().squeeze(-1)
    vocab = student_logits.size(-1)
    student = student_logits.reshape(-1, vocab).index_select(0, index)
    with torch.no_grad():
        target = torch.softmax(teacher_logits.reshape(-1, vocab).index_select(0, index), dim=-1)
    ce = F.cross_entropy(student, target, reduction="sum")
    return weight * ce / (index.numel() if num_tokens is None else num_tokens)


@torch.no_grad()
def shape_advantages(
    advantages: torch.Tensor,
    sampling_logprobs: list[torch.Tensor],
    base_logprobs: list[torch.Tensor],
    kl_penalty_coef: float = 0.01,
) -> list[torch.Tensor]:
    """Token advantages: the answer's advantage less kl_penalty_coef (log pi - log base) of the
    token itself.

    advantages: [S]; the lists hold one tensor [T_i] for each answer. Immediate: a token does not
    pay for the KL of later tokens, so the penalty acts on each visited state by itself.
    """
    shaped = []
    for adv, logp, base in zip(advantages.unbind(), sampling_logprobs, base_logprobs, strict=False):
        shaped.append(adv + kl_penalty_coef * (base - logp))
    return shaped


@dataclass
class LeaveOneOutConfig:
    rollouts_per_prompt: int = 2
    kl_coef: float = 0.05


class LeaveOneOut:
    """Scores less kl_coef times the answer's log-ratio to the reference, centred without the answer
    itself.

    The centred reward times G / (G - 1) is the reward less the mean of the others.
    """

    def __init__(self, config: LeaveOneOutConfig):
        self.config = config

    def __call__(self, rewards, logprobs, ref_logprobs, response_mask):
        """rewards [B] (answers of a prompt in consecutive rows), the others [B, T] -> advantages
        [B], detached.
        """
        g = self.config.rollouts_per_prompt
        gap = torch.where(response_mask.bool(), logprobs - ref_logprobs, 0.0).detach()
        shaped = torch.sub(rewards, gap.sum(dim=1), alpha=self.config.kl_coef)
        shaped = shaped.reshape(-1, g)
        return (shaped - shaped.mean(1, keepdim=True)).mul(g / (g - 1)).reshape(-1)


def leave_one_out(rewards, logprobs, ref_logprobs, response_mask, config=LeaveOneOutConfig()):  # noqa: B008
    """Scores less kl_coef times the answer's log-ratio to the reference, centred without it."""
    return LeaveOneOut(config)(rewards, logprobs, ref_logprobs, response_mask)


def gspo_token_loss(
    per_token_logps,
    old_per_token_logps,
    ref_per_token_logps,
    completion_mask,
    advantages,
    beta=0.01,
    epsilon_low=3e-4,
    epsilon_high=4e-4,
    max_completion_length=8,
):
    """Sequence ratio in value, token ratio in gradient; advantages may be [B] or [B, T].

    The KL is k3 times the token's own ratio to the sampler (not the answer's), the ratio with
    gradient: the reverse KL at the states that the sampler visited. Token sum over a fixed length,
    mean over rows.
    """
    mask = completion_mask.bool()
    log_ratio = (per_token_logps - old_per_token_logps.detach()).masked_fill(~mask, 0.0)
    seq = (log_ratio.sum(-1) / mask.sum(-1).clamp(min=1)).detach().unsqueeze(-1)
    s = torch.exp(seq + log_ratio - log_ratio.detach())
    adv = advantages.detach()
    adv = adv if adv.dim() == 2 else adv.unsqueeze(-1)
    pg = torch.maximum(-adv * s, -adv * s.clamp(1 - epsilon_low, 1 + epsilon_high))

    gap = (per_token_logps - ref_per_token_logps.detach()).masked_fill(~mask, 0.0)
    k3 = torch.expm1(-gap) + gap
    kl = log_ratio.exp() * k3
    total = torch.where(mask, pg + beta * kl, 0.0)
    return total.sum(-1).div(max_completion_length).mean()


class CispoOut(NamedTuple):
    loss: torch.Tensor
    kl: torch.Tensor
    weight_max: torch.Tensor


def flat_cispo(
    trainer_logprobs: torch.Tensor,
    inference_logprobs: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    position_ids: torch.Tensor,
    teacher_tau: float = 0.01,
    cap: float = 5.0,
    tokens_per_answer: int = 8,
) -> CispoOut:
    """Detached, capped weight x advantage x log-prob, and k2 to the teacher with the detached
    uncapped weight.

    trainer_logprobs, inference_logprobs, teacher_logprobs, position_ids: [N]; advantages: one for
    each answer, [S]. Divided by answers x tokens_per_answer.
    """
    start = position_ids.eq(0)
    answers = start.sum()
    adv = advantages.detach()[start.cumsum(0) - 1]
    weight = (trainer_logprobs - inference_logprobs).detach().exp()
    pg = -weight.clamp(max=cap) * adv * trainer_logprobs
    kl = weight * 0.5 * (trainer_logprobs - teacher_logprobs.detach()).square()
    norm = answers * tokens_per_answer
    loss = (pg + teacher_tau * kl).sum() / norm
    return CispoOut(loss, (kl.detach().sum() / norm), weight.max())


@dataclass
class DrGRPOConfig:
    num_generations: int = 2
    max_tokens: int = 8
    beta: float = 0.01
    clip: float = 0.2


def dr_grpo_loss(
    logits, ref_logits, input_ids, old_logps, rewards, completion_mask, config: DrGRPOConfig
):
    """Centred rewards (no division by the spread), a constant divisor, and KL(policy || ref) over
    the vocabulary.

    logits, ref_logits [B, L, V]: row t predicts input_ids[:, t + 1]. completion_mask [B, L] marks
    the tokens of input_ids that were sampled (never the first). old_logps [B, L - 1]: of
    input_ids[:, 1:]. rewards [B].
    """
    sampled = completion_mask[:, 1:].bool()
    lp = logits[:, :-1][sampled].log_softmax(-1)
    ref_lp = ref_logits[:, :-1][sampled].detach().log_softmax(-1)
    token_lp = lp.gather(-1, input_ids[:, 1:][sampled][:, None]).squeeze(-1)

    groups = rewards.detach().view(-1, config.num_generations)
    adv = (groups - groups.mean(-1, keepdim=True)).view(-1, 1).expand_as(sampled)[sampled]
    ratio = (token_lp - old_logps[sampled].detach()).exp()
    surrogate = torch.min(ratio * adv, ratio.clamp(1 - config.clip, 1 + config.clip) * adv)

    kl = torch.sum(lp.exp() * (lp - ref_lp), dim=-1)
    return (config.beta * kl - surrogate).sum() / (len(rewards) * config.max_tokens)


class GatedPPO(nn.Module):
    """Ratio x advantage, switched off where the ratio has left the trust region in the direction of
    the advantage.

    The gradient is PPO's. The KL (coef beta) has the value k1 x ratio and is differentiated through
    the ratio: the reverse KL on stale tokens. forward() takes one micro-batch; step_tokens is the
    number of valid tokens of the whole optimizer step, so that the micro-batches' losses add up to
    the token mean of the step.
    """

    def __init__(self, beta: float = 0.01, low: float = 0.2, high: float = 0.2):
        super().__init__()
        self.beta, self.low, self.high = beta, low, high

    def forward(
        self, new_logprobs, old_logprobs, ref_logprobs, advantages, response_masks, step_tokens
    ):
        valid = response_masks.bool()
        new, old = new_logprobs[valid], old_logprobs[valid].detach()
        ref, adv = ref_logprobs[valid].detach(), advantages[valid].detach()
        ratio = torch.exp(new - old)
        with torch.no_grad():
            gate = torch.where(adv >= 0, ratio <= 1 + self.high, ratio >= 1 - self.low)
        pg = -(gate * ratio * adv)
        kl = ratio * (new - ref).detach()
        return (pg.sum() + self.beta * kl.sum()) / step_tokens


def kl_returns(scores, log_probs, ref_log_probs, response_mask, kl_coef=0.01, baseline=None):
    """REINFORCE returns (gamma 1): the score of the answer plus -kl_coef x k1 of this and all later
    tokens.

    scores: [B]; log_probs, ref_log_probs, response_mask: [B, T]; baseline: optional [B], subtracted
    from each return. Returns [B, T] without gradient, zero on padding.
    """
    valid = response_mask.bool()
    k1 = (log_probs.detach() - ref_log_probs.detach()).masked_fill(~valid, 0.0)
    width = k1.size(1)
    later = torch.ones(width, width, dtype=k1.dtype, device=k1.device).tril()
    returns = scores[:, None].to(k1.dtype) - kl_coef * torch.einsum("bt,ts->bs", k1, later)
    if baseline is not None:
        returns = returns - baseline[:, None]
    return torch.where(valid, returns, 0.0)


def is_weighted_kl(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    sampler_logps: torch.Tensor,
    mask: torch.Tensor,
    beta: float = 1.0,
) -> torch.Tensor:
    """beta x (pi / mu) x (log pi - log ref) for each token, [B, T], zero where mask is 0; the
    caller aggregates.

    The ratio carries gradient. Under mu the expectation is KL(pi || ref) at the state, in value and
    in gradient.
    """
    dead = mask == 0
    gap = (logps - ref_logps.detach()).masked_fill(dead, 0.0)
    log_weight = (logps - sampler_logps.detach()).masked_fill(dead, 0.0)
    return beta * log_weight.exp() * gap


def magic_box(x: torch.Tensor) -> torch.Tensor:
    """1 in value; d/dx in gradient."""
    return torch.exp(x - x.detach())


def dice_kl_loss(logprobs, ref_logprobs, attention_mask, kl_coef: float = 0.01):
    """kl_coef times the log-ratio of the answer, each token's part made a function of all tokens up
    to it.

    On-policy; value: the k1 estimate of the KL of the whole answer, mean over rows; gradient: that
    of its expectation.
    """
    real = attention_mask.bool()
    logprobs = torch.where(real, logprobs, 0.0)
    ref_logprobs = torch.where(real, ref_logprobs, 0.0)
    so_far = logprobs.cumsum(dim=-1)
    cost = (logprobs - ref_logprobs).detach()
    per_answer = (magic_box(so_far) * cost).sum(dim=-1)
    return kl_coef * per_answer.mean(dim=0)


class MixedKL(nn.Module):
    """coef x [ lam KL(student || teacher) + (1 - lam) KL(teacher || student) ], each over the full
    vocabulary.

    Token sum over rows x response_length. With lam = 0.5 it is half the Jeffreys divergence.
    """

    def __init__(self, coef: float = 1.0, lam: float = 0.5, response_length: int = 8):
        super().__init__()
        self.coef = coef
        self.lam = lam
        self.response_length = response_length

    def forward(self, batch: dict) -> dict:
        """batch: student_logits, teacher_logits [B, T, V], response_mask [B, T]. Returns a dict
        with 'loss'.
        """
        mask = batch["response_mask"].bool()
        s = batch["student_logits"][mask].log_softmax(-1)
        t = batch["teacher_logits"][mask].detach().log_softmax(-1)
        gap = s - t
        reverse = (s.exp() * gap).sum(-1)
        forward = -(t.exp() * gap).sum(-1)
        both = torch.lerp(forward, reverse, self.lam)
        loss = self.coef * both.sum() / (mask.size(0) * self.response_length)
        return {
            "loss": loss,
            "reverse": reverse.detach().mean(),
            "forward": forward.detach().mean(),
        }


def topk_generalised_kl(
    student_logits: torch.Tensor,
    teacher_topk_ids: torch.Tensor,
    teacher_topk_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    opd_coef: float = 1.0,
    max_tokens: int = 8,
) -> torch.Tensor:
    """opd_coef x sum over the teacher's top k of q log(q / p) - q + p, which is 0 only where q = p
    on all of them.

    q: student, p: teacher, both with their mass over the whole vocabulary. student_logits [B, T,
    V], ids and log-probs [B, T, k], loss_mask [B, T]. Token sum over rows x max_tokens.
    """
    keep = loss_mask.bool()
    log_q = torch.log_softmax(student_logits[keep], dim=-1).gather(-1, teacher_topk_ids[keep])
    log_p = teacher_topk_logprobs[keep].detach()
    q, p = log_q.exp(), log_p.exp()
    token_kl = (q * (log_q - log_p) - q + p).sum(dim=-1)
    return opd_coef * token_kl.sum() / (loss_mask.shape[0] * max_tokens)


@dataclass
class DAPOConfig:
    group_size: int = 4
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_len: int = 8
    overlong_buffer: int = 2
    adv_eps: float = 1e-6


def dapo_loss(logprobs, old_logprobs, rewards, response_mask, config: DAPOConfig, step_tokens=None):
    """Token mean over the step of the asymmetrically clipped loss; there is no KL term.

    rewards [B] get the soft overlong penalty (0 to -1 within the last overlong_buffer tokens of
    max_len), then are standardised in each group of consecutive rows. step_tokens defaults to the
    tokens of the call.
    """
    mask = response_mask.bool()
    lengths = mask.sum(-1)
    excess = lengths - (config.max_len - config.overlong_buffer)
    shaped = rewards - (excess.clamp(min=0) / config.overlong_buffer).clamp(max=1.0)

    groups = shaped.view(-1, config.group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    adv = (centred / (groups.std(dim=1, keepdim=True) + config.adv_eps)).view(-1, 1).detach()

    ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0.0).exp()
    bound = torch.where(
        adv > 0, ratio.clamp(max=1 + config.clip_high), ratio.clamp(min=1 - config.clip_low)
    )
    loss = -(bound * adv).masked_fill(~mask, 0.0).sum()
    return loss / (lengths.sum() if step_tokens is None else step_tokens)
