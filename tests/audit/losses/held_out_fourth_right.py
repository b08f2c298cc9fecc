"""Right losses of the fourth set held out, by somebody who had not seen the audit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn


def packed_answer_sum(
    logprobs,
    behav_logprobs,
    ref_logprobs,
    advantages,
    loss_mask,
    cu_seqlens,
    kl_beta=0.01,
    eps_clip=0.2,
):
    """Packed PPO with k3 times a live ratio, summed over each answer.

    logprobs, behav_logprobs, ref_logprobs, advantages, loss_mask: [N], answers end to end;
    cu_seqlens: [S + 1].
    """
    keep = loss_mask.bool()
    zero = torch.zeros_like(logprobs)
    log_ratio = torch.where(keep, logprobs - behav_logprobs, zero)
    ratio = log_ratio.exp()
    surrogate = torch.minimum(
        ratio * advantages, ratio.clamp(1 - eps_clip, 1 + eps_clip) * advantages
    )

    back = torch.where(keep, ref_logprobs - logprobs, zero)
    kl = (torch.expm1(back) - back) * ratio

    per_token = torch.where(keep, kl_beta * kl - surrogate, zero)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    owner = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    per_answer = torch.zeros(lengths.numel(), dtype=logprobs.dtype).index_add(0, owner, per_token)
    return per_answer.mean()


class VocabKL(nn.Module):
    def __init__(self, coef=0.05, chunk_size=2):
        super().__init__()
        self.coef = coef
        self.chunk_size = chunk_size

    def forward(self, logits, ref_logits, response_mask, num_items_in_batch):
        total = logits.new_zeros(())
        pieces = zip(  # noqa: B905
            logits.split(self.chunk_size, dim=1),
            ref_logits.detach().split(self.chunk_size, dim=1),
            response_mask.split(self.chunk_size, dim=1),
        )
        for z, z_ref, mask in pieces:
            p = z.softmax(-1)
            entropy = z.logsumexp(-1) - (p * z).sum(-1)
            cross_entropy = z_ref.logsumexp(-1) - (p * z_ref).sum(-1)
            total = total + ((cross_entropy - entropy) * mask).sum()
        return self.coef * total / num_items_in_batch


def vocab_kl_chunks(logits, ref_logits, response_mask, num_items_in_batch, coef=0.05):
    """The full reverse KL in chunks, as a cross-entropy less the entropy.

    logits, ref_logits: [B, T, V], position t predicts the token that response_mask[:, t] marks.
    """
    return VocabKL(coef)(logits, ref_logits, response_mask, num_items_in_batch)


def tinker_distill(batch, kl_penalty_coef=1.0):
    """On-policy distillation by a detached k1, added to whatever advantages come with the batch.

    batch: logprobs, sampling_logprobs, teacher_logprobs, advantages, mask, each [B, T].
    """
    keep = batch["mask"].bool()
    zero = torch.zeros_like(batch["logprobs"])
    logprobs = torch.where(keep, batch["logprobs"], zero)
    sampling = torch.where(keep, batch["sampling_logprobs"], zero)
    teacher = torch.where(keep, batch["teacher_logprobs"], zero)

    reverse_kl = logprobs.detach() - teacher
    advantages = torch.where(keep, batch["advantages"], zero) - kl_penalty_coef * reverse_kl
    prob_ratio = torch.exp(logprobs - sampling)
    loss = -(prob_ratio * advantages * keep).sum() / keep.size(0)
    return {"loss": loss, "teacher_kl": (reverse_kl.sum() / keep.sum().clamp(min=1)).item()}


def _segment_sum(x, ids, n):
    return torch.zeros(n, dtype=x.dtype).index_add(0, ids, x)


def async_gspo(
    per_token_logps,
    old_per_token_logps,
    ref_per_token_logps,
    advantages,
    sequence_id,
    completion_mask,
    beta=0.02,
    epsilon=3e-4,
    epsilon_high=4e-4,
):
    """GSPO on one packed row, clipped by the sign of its advantage, with k2.

    Log-probs, sequence_id (0 .. S - 1), completion_mask: [1, L]; advantages: [S].
    """
    ids = sequence_id.squeeze(0)
    n = advantages.numel()
    keep = completion_mask.squeeze(0).bool()
    mask = keep.to(per_token_logps.dtype)
    logps, old, ref = (
        torch.where(keep, x.squeeze(0), torch.zeros_like(mask))
        for x in (per_token_logps, old_per_token_logps, ref_per_token_logps)
    )
    length = _segment_sum(mask, ids, n).clamp(min=1)
    log_s = _segment_sum(logps - old, ids, n) / length
    s = log_s.exp()
    policy = (
        torch.where(advantages > 0, s.clamp(max=1 + epsilon_high), s.clamp(min=1 - epsilon))
        * advantages
    )
    gap = _segment_sum(0.5 * (logps - ref).square(), ids, n) / length
    return (beta * gap - policy).mean()


def agg_loss(loss_mat, loss_mask, batch_num_tokens, dp_size):
    return (loss_mat * loss_mask).sum() / batch_num_tokens * dp_size


def verl_cispo(old_log_prob, log_prob, advantages, response_mask, ref_log_prob, config=None):
    """CISPO and k2, over the tokens of a step.

    All tensors [B, T]. config: clip_ratio_high, kl_loss_coef, global_batch_info.
    Returns (loss, metrics).
    """
    config = {"clip_ratio_high": 4.0, "kl_loss_coef": 0.01, **(config or {})}
    info = {
        "batch_num_tokens": response_mask.sum().clamp(min=1),
        "dp_size": 1,
        **config.get("global_batch_info", {}),
    }
    keep = response_mask.bool()
    zero = torch.zeros_like(log_prob)
    log_prob = torch.where(keep, log_prob, zero)
    negative_approx_kl = log_prob.detach() - torch.where(keep, old_log_prob, zero)
    weight = torch.exp(negative_approx_kl).clamp(max=1 + config["clip_ratio_high"])
    pg_losses = -weight * advantages * log_prob
    kld = 0.5 * torch.square(log_prob - torch.where(keep, ref_log_prob, zero))
    pg_loss = agg_loss(pg_losses, response_mask, **info)
    kl_loss = agg_loss(kld, response_mask, **info)
    metrics = {
        "actor/ppo_kl": -negative_approx_kl[keep].mean().item(),
        "actor/kl_loss": kl_loss.item(),
    }
    return pg_loss + config["kl_loss_coef"] * kl_loss, metrics


@dataclass
class Experience:
    action_log_probs: torch.Tensor
    base_action_log_probs: torch.Tensor
    advantages: torch.Tensor
    action_mask: torch.Tensor


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)


class PolicyLoss(nn.Module):
    def __init__(self, clip_eps_low=0.2, clip_eps_high=0.28, dual_clip=3.0):
        super().__init__()
        self.clip_eps_low = clip_eps_low
        self.clip_eps_high = clip_eps_high
        self.dual_clip = dual_clip

    def forward(self, log_probs, old_log_probs, advantages, action_mask):
        ratio = (log_probs - old_log_probs).exp()
        surr1 = ratio * advantages
        surr2 = ratio.clamp(1 - self.clip_eps_low, 1 + self.clip_eps_high) * advantages
        clip1 = torch.min(surr1, surr2)
        clip2 = torch.max(clip1, self.dual_clip * advantages)
        return masked_mean(-torch.where(advantages < 0, clip2, clip1), action_mask)


def openrlhf_actor(action_log_probs, experience, kl_ctl=0.01):
    """Dual-clip PPO for negative advantages only, with k2.

    action_log_probs: [B, T], the live ones; experience: Experience of [B, T] tensors from the
    rollout.
    """
    keep = experience.action_mask.bool()
    zero = torch.zeros_like(action_log_probs)
    live = torch.where(keep, action_log_probs, zero)
    old = torch.where(keep, experience.action_log_probs, zero)
    base = torch.where(keep, experience.base_action_log_probs, zero)
    actor_loss = PolicyLoss()(live, old, experience.advantages, experience.action_mask)
    kl_loss = masked_mean((live - base).square() / 2.0, experience.action_mask)
    return actor_loss + kl_ctl * kl_loss


@dataclass
class RolloutBatch:
    logps: torch.Tensor
    ref_logps: torch.Tensor
    rewards: torch.Tensor
    response_masks: torch.Tensor


@dataclass
class Args:
    num_samples: int = 4
    beta: float = 0.02
    generate_max_length: int = 16


def dr_grpo_step(batch, args=Args()):  # noqa: B008
    """GRPO from rewards centred and not divided, with a detached k1 in its signal.

    batch.logps, ref_logps, response_masks: [B, T]; rewards: [B], a prompt's num_samples answers
    side by side.
    """
    grouped = batch.rewards.view(-1, args.num_samples)
    advantages = (grouped - grouped.mean(dim=1, keepdim=True)).reshape(-1, 1)
    keep = batch.response_masks.bool()
    logps = torch.where(keep, batch.logps, torch.zeros_like(batch.logps))
    drift = torch.where(keep, logps.detach() - batch.ref_logps.detach(), torch.zeros_like(logps))
    signal = (advantages - args.beta * drift) * keep
    return -(signal * logps).sum() / (logps.size(0) * args.generate_max_length)


class RLOOLoss:
    """REINFORCE leave-one-out; answer i of prompt j is row i * prompts + j."""

    def __init__(self, rloo_k=4, kl_coef=0.05):
        self.rloo_k = rloo_k
        self.kl_coef = kl_coef

    def __call__(self, logprobs, ref_logprobs, scores, padding_mask):
        pad = padding_mask.bool()
        logprobs = logprobs.masked_fill(pad, 0.0)
        ref_logprobs = ref_logprobs.masked_fill(pad, 0.0)
        sequence_logprob = logprobs.sum(1)
        with torch.no_grad():
            sequence_kl = (logprobs - ref_logprobs).sum(1)
            rlhf_reward = (scores - self.kl_coef * sequence_kl).reshape(self.rloo_k, -1)
            baseline = (rlhf_reward.sum(0) - rlhf_reward) / (self.rloo_k - 1)
            advantages = (rlhf_reward - baseline).flatten()
        return (-advantages * sequence_logprob).mean()


def rloo_k_loss(logprobs, ref_logprobs, scores, padding_mask, rloo_k=4, kl_coef=0.05):
    """Leave-one-out as a loss, with k1 of an answer in its reward.

    logprobs, ref_logprobs: [B, T]; scores: [B]; padding_mask: [B, T], True on padding.
    """
    return RLOOLoss(rloo_k, kl_coef)(logprobs, ref_logprobs, scores, padding_mask)


def slime_returns(rewards, log_probs, ref_log_probs, loss_masks, kl_coef=0.01, gamma=1.0):
    """REINFORCE++ returns with k1 in the reward, by lists.

    rewards: list of floats; log_probs, ref_log_probs, loss_masks: lists of [T_i]. Returns a list of
    [T_i].
    """
    out = []
    for reward, logp, ref_logp, mask in zip(
        rewards, log_probs, ref_log_probs, loss_masks, strict=True
    ):
        kl = torch.where(mask.bool(), (logp - ref_logp).detach(), torch.zeros_like(ref_logp))
        token_rewards = -kl_coef * kl
        last = int(mask.nonzero()[-1])
        token_rewards[last] += float(reward)
        returns = torch.zeros_like(token_rewards)
        running = torch.zeros((), dtype=token_rewards.dtype)
        for t in range(token_rewards.numel() - 1, -1, -1):
            running = token_rewards[t] + gamma * running
            returns[t] = running
        out.append(returns * mask)
    return out


class SampledKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logps, ref_logps):
        delta = logps - ref_logps
        ctx.save_for_backward(delta)
        return torch.expm1(-delta) + delta

    @staticmethod
    def backward(ctx, grad_output):
        (delta,) = ctx.saved_tensors
        return grad_output * delta, None


def kl_function(logps, ref_logps, advantages, completion_mask, beta=0.04, max_completion_length=16):
    """The value of k3 with the gradient of k2, by a Function of autograd.

    logps, ref_logps, completion_mask: [B, T]; advantages: [B]. Fresh samples, one update each.
    """
    keep = completion_mask.bool()
    logps = torch.where(keep, logps, torch.zeros_like(logps))
    ref_logps = torch.where(keep, ref_logps, torch.zeros_like(logps)).detach()
    policy = torch.exp(logps - logps.detach()) * advantages.unsqueeze(1)
    per_token = beta * SampledKL.apply(logps, ref_logps) - policy
    return (per_token * keep).sum() / (logps.size(0) * max_completion_length)


@torch.no_grad()
def gae_token_rewards(
    token_level_scores,
    old_log_probs,
    ref_log_prob,
    values,
    response_mask,
    kl_ctrl=0.01,
    gamma=1.0,
    lam=1.0,
):
    """k1 in the reward, as generalised advantages over valid tokens.

    All tensors [B, T]. Returns (advantages, returns), both [B, T].
    """
    mask = response_mask.to(values.dtype)
    kld = torch.where(response_mask.bool(), old_log_probs - ref_log_prob, torch.zeros_like(values))
    token_level_rewards = token_level_scores * mask - kl_ctrl * kld

    next_value = torch.zeros_like(values[:, 0])
    last_gae = torch.zeros_like(values[:, 0])
    steps = []
    for t in reversed(range(values.size(1))):
        delta = token_level_rewards[:, t] + gamma * next_value - values[:, t]
        gae = delta + gamma * lam * last_gae
        live = response_mask[:, t].bool()
        next_value = torch.where(live, values[:, t], next_value)
        last_gae = torch.where(live, gae, last_gae)
        steps.append(last_gae)
    advantages = torch.stack(steps[::-1], dim=1) * mask
    return advantages, (advantages + values) * mask


def gkd_jsd(student_logits, teacher_logits, labels, beta=0.5, temperature=1.0):
    """The Jensen-Shannon divergence, where labels hold the mask.

    student_logits, teacher_logits: [B, T, V], aligned with labels [B, T] (-100 does not count).
    """
    s = torch.log_softmax(student_logits / temperature, dim=-1)
    t = torch.log_softmax(teacher_logits.detach() / temperature, dim=-1)
    mixture = torch.logsumexp(torch.stack([t + math.log(beta), s + math.log(1 - beta)]), dim=0)
    kl_teacher = torch.nn.functional.kl_div(mixture, t, reduction="none", log_target=True).sum(-1)
    kl_student = torch.nn.functional.kl_div(mixture, s, reduction="none", log_target=True).sum(-1)
    jsd = beta * kl_teacher + (1 - beta) * kl_student
    valid = labels != -100
    return jsd[valid].sum() / valid.sum()


def topk_tail_opd(
    student_logits, teacher_topk_logprobs, teacher_topk_ids, response_mask, distill_coef=1.0
):
    """The reverse KL of the teacher's top k and one class for all the rest.

    student_logits: [B, T, V]; teacher_topk_logprobs, teacher_topk_ids: [B, T, K], K < V;
    response_mask: [B, T].
    """
    logp = torch.log_softmax(student_logits, dim=-1)
    head_s = logp.gather(-1, teacher_topk_ids)
    inside = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, teacher_topk_ids, True)
    tail_s = logp.masked_fill(inside, float("-inf")).logsumexp(-1, keepdim=True)
    head_t = teacher_topk_logprobs.detach()
    tail_t = torch.log1p(-head_t.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    s = torch.cat([head_s, tail_s], dim=-1)
    t = torch.cat([head_t, tail_t], dim=-1)
    per_token = (s.exp() * (s - t)).sum(-1)
    return distill_coef * (per_token * response_mask).sum() / response_mask.sum().clamp(min=1)


def areal_decoupled(logprobs, input_data, eps_clip=0.2, behav_imp_weight_cap=5.0, kl_ctl=0.05):
    """Decoupled PPO with k2 times a detached ratio.

    logprobs: [N], packed. input_data: logprobs (behaviour), prox_logp, ref_logp, advantages,
    loss_mask, each [N].
    """
    loss_mask = input_data["loss_mask"].bool()
    zero = torch.zeros_like(logprobs)
    behav = torch.where(loss_mask, input_data["logprobs"], zero)
    prox = torch.where(loss_mask, input_data["prox_logp"], zero)
    ref = torch.where(loss_mask, input_data["ref_logp"], zero)
    logprobs = torch.where(loss_mask, logprobs, zero)
    advantages = input_data["advantages"].detach()

    ratio = torch.exp(logprobs - prox)
    pg_loss = torch.max(
        -advantages * ratio, -advantages * ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip)
    )
    behav_imp_weight = torch.exp(prox - behav).detach()
    pg_loss = pg_loss * torch.where(
        behav_imp_weight <= behav_imp_weight_cap, behav_imp_weight, zero
    )

    kl = torch.exp(logprobs - behav).detach() * 0.5 * (logprobs - ref).square()
    loss = torch.where(loss_mask, pg_loss + kl_ctl * kl, zero)
    return loss.sum() / loss_mask.count_nonzero().clamp(min=1)


CLIPPED_PG_CONFIG = {
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "reference_policy_kl_penalty": 0.01,
    "use_importance_sampling_correction": True,
}


class ClippedPGLossFn:
    def __init__(self, cfg):
        self.ratio_clip_min = cfg["ratio_clip_min"]
        self.ratio_clip_max = cfg["ratio_clip_max"]
        self.reference_policy_kl_penalty = cfg["reference_policy_kl_penalty"]
        self.use_importance_sampling_correction = cfg["use_importance_sampling_correction"]

    def __call__(self, next_token_logits, data, global_valid_toks):
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        keep = mask.bool()
        advantages = data["advantages"][:, 1:]
        all_logprobs = torch.log_softmax(next_token_logits[:, :-1], dim=-1)
        curr = all_logprobs.gather(-1, data["input_ids"][:, 1:].unsqueeze(-1)).squeeze(-1)
        zero = torch.zeros_like(curr)
        prev, gen, ref = (
            torch.where(keep, data[k][:, 1:], zero)
            for k in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
        )
        curr = torch.where(keep, curr, zero)

        ratios = (curr - prev).exp()
        clipped = ratios.clamp(1.0 - self.ratio_clip_min, 1.0 + self.ratio_clip_max)
        weights = (
            torch.exp(prev - gen).detach()
            if self.use_importance_sampling_correction
            else torch.ones_like(prev)
        )
        clip_loss = weights * torch.max(-advantages * ratios, -advantages * clipped)

        r = ref - curr
        kl = r.exp() - 1 - r
        kl = kl + kl.detach() * (curr - curr.detach())
        loss = torch.where(keep, clip_loss + self.reference_policy_kl_penalty * kl, zero)
        return loss.sum() / global_valid_toks


def nemo_clipped_pg(next_token_logits, data, global_valid_toks, reference_policy_kl_penalty=0.01):
    """PPO with an engine's weight, and k3 with its score term.

    next_token_logits: [B, S, V]. data: input_ids, token_mask, advantages, prev_logprobs,
    generation_logprobs, reference_policy_logprobs [B, S] (entry t belongs to token t, entry 0 is
    unused); sample_mask [B].
    """
    cfg = {**CLIPPED_PG_CONFIG, "reference_policy_kl_penalty": reference_policy_kl_penalty}
    return ClippedPGLossFn(cfg)(next_token_logits, data, global_valid_toks)
