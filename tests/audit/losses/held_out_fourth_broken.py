"""Broken losses of the fourth set held out, by somebody who had not seen the audit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn


@dataclass
class AlgorithmConfig:
    eps_clip_low: float = 0.2
    eps_clip_high: float = 0.28
    use_kl_loss: bool = True
    kl_loss_coef: float = 0.02
    kl_estimator_type: str = "k2"


def skyrl_masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def skyrl_approx_kl(log_probs, log_probs_base, loss_mask=None, kl_estimator_type="k3"):
    log_ratio = log_probs - log_probs_base
    if loss_mask is not None:
        log_ratio = torch.where(loss_mask.bool(), log_ratio, torch.zeros_like(log_ratio))
    if kl_estimator_type == "k1":
        return log_ratio
    if kl_estimator_type == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(-log_ratio) + log_ratio


def skyrl_training_step(
    action_log_probs,
    old_action_log_probs,
    base_action_log_probs,
    advantages,
    loss_mask,
    config=AlgorithmConfig(),  # noqa: B008
):
    """The helper of the KL runs under no_grad.

    After NovaSky-AI/SkyRL#1340.

    All tensors [B, T]. Returns (loss, status).
    """
    mask = loss_mask.to(action_log_probs.dtype)
    diff = torch.where(
        loss_mask.bool(),
        action_log_probs - old_action_log_probs,
        torch.zeros_like(action_log_probs),
    )
    ratio = diff.exp()
    surr1 = ratio * advantages
    surr2 = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high) * advantages
    policy_loss = skyrl_masked_mean(-torch.min(surr1, surr2), mask)

    kl_loss = torch.zeros((), dtype=policy_loss.dtype)
    if config.use_kl_loss:
        kl = skyrl_approx_kl(
            action_log_probs, base_action_log_probs, loss_mask, config.kl_estimator_type
        )
        kl_loss = skyrl_masked_mean(kl, mask)
    loss = policy_loss + config.kl_loss_coef * kl_loss
    return loss, {"policy_loss": policy_loss.item(), "policy_kl": kl_loss.item()}


@dataclass(frozen=True)
class GRPOConfig:
    beta: float = 0.04
    epsilon: float = 0.2
    epsilon_high: float | None = None
    kl_loss_mode: str = "kl"
    loss_agg_mode: str = "sequence-mean-token-mean"


def compute_kl_divergence(per_token_logps, ref_per_token_logps, method="kl"):
    delta = per_token_logps - ref_per_token_logps
    if method == "kl":
        return delta
    if method == "mse_kl":
        return 0.5 * delta.square()
    if method == "low_var_kl":
        return torch.exp(-delta) + delta - 1
    raise ValueError(method)


def aggregate_loss(per_token_loss, completion_mask, loss_agg_mode):
    if loss_agg_mode == "token-mean":
        return (per_token_loss * completion_mask).sum() / completion_mask.sum().clamp(min=1)
    per_seq = (per_token_loss * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1)
    return per_seq.mean()


def tunix_grpo(
    per_token_logps,
    old_per_token_logps,
    ref_per_token_logps,
    advantages,
    completion_mask,
    algo_config=GRPOConfig(),
):
    """k1 as a loss, meant over each answer.

    After NVIDIA-NeMo/RL#2506.

    Log-probs and completion_mask [B, T], advantages [B]. Returns (loss, aux).
    """
    high = algo_config.epsilon if algo_config.epsilon_high is None else algo_config.epsilon_high
    keep = completion_mask.bool()
    zero = torch.zeros_like(per_token_logps)
    logps = torch.where(keep, per_token_logps, zero)
    old = torch.where(keep, old_per_token_logps, zero)
    ref = torch.where(keep, ref_per_token_logps, zero)
    coef_1 = torch.exp(logps - old)
    coef_2 = coef_1.clamp(1 - algo_config.epsilon, 1 + high)
    adv = advantages[:, None]
    per_token_loss = -torch.minimum(coef_1 * adv, coef_2 * adv)
    aux = {"kl": 0.0}
    if algo_config.beta:
        kl = compute_kl_divergence(logps, ref, algo_config.kl_loss_mode)
        per_token_loss = per_token_loss + algo_config.beta * kl
        aux["kl"] = aggregate_loss(kl.detach(), completion_mask, algo_config.loss_agg_mode).item()
    return aggregate_loss(per_token_loss, completion_mask, algo_config.loss_agg_mode), aux


@dataclass
class GRPOArguments:
    beta: float = 0.04
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    importance_sampling_level: str = "sequence"
    use_bias_correction_kl: bool = True


def trl_compute_loss(inputs, args=GRPOArguments()):  # noqa: B008
    """The live ratio of an answer multiplies the k3 of each token.

    After huggingface/trl#6586.

    inputs: per_token_logps, old_per_token_logps, ref_per_token_logps, completion_mask [B, T];
    advantages [B].
    """
    logps = inputs["per_token_logps"]
    mask = inputs["completion_mask"].to(logps.dtype)
    keep = mask.bool()
    advantages = inputs["advantages"].unsqueeze(1)

    log_ratio = torch.where(keep, logps - inputs["old_per_token_logps"], torch.zeros_like(logps))
    if args.importance_sampling_level == "token":
        log_importance_weights = log_ratio
    elif args.importance_sampling_level == "sequence":
        log_importance_weights = (log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
        log_importance_weights = log_importance_weights.unsqueeze(-1)
    else:
        raise ValueError(args.importance_sampling_level)

    coef_1 = torch.exp(log_importance_weights)
    coef_2 = torch.clamp(coef_1, 1 - args.epsilon, 1 + args.epsilon_high)
    per_token_loss = -torch.min(coef_1 * advantages, coef_2 * advantages)

    if args.beta != 0.0:
        ref_diff = torch.where(keep, inputs["ref_per_token_logps"] - logps, torch.zeros_like(logps))
        per_token_kl = torch.exp(ref_diff) - ref_diff - 1
        if args.use_bias_correction_kl:
            per_token_kl = per_token_kl * coef_1
        per_token_loss = per_token_loss + args.beta * per_token_kl

    return ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


def kl_penalty(logprob, ref_logprob, kl_penalty_type):
    """Per-token KL of the policy to the reference from the log-probs of sampled tokens."""
    if kl_penalty_type in ("kl", "k1"):
        return logprob - ref_logprob
    if kl_penalty_type in ("mse", "k2"):
        return 0.5 * (logprob - ref_logprob).square()
    if kl_penalty_type in ("low_var_kl", "k3"):
        kl = torch.clamp(ref_logprob - logprob, min=-20, max=20)
        return torch.exp(kl) - kl - 1
    raise NotImplementedError(kl_penalty_type)


class FSDPActor:
    def __init__(
        self, kl_beta=0.01, kl_penalty_type="low_var_kl", clip_ratio_low=0.2, clip_ratio_high=0.28
    ):
        self.kl_beta = kl_beta
        self.kl_penalty_type = kl_penalty_type
        self.clip_ratio_low = clip_ratio_low
        self.clip_ratio_high = clip_ratio_high

    def loss_agg_func(self, x, mask):
        return (x * mask).sum() / mask.sum().clamp(min=1)

    def run_loss(self, logprobs, prev_logprobs, ref_logprobs, advantages, loss_mask):
        keep = loss_mask.bool()
        zero = torch.zeros_like(logprobs)
        logprobs = torch.where(keep, logprobs, zero)
        prev_logprobs = torch.where(keep, prev_logprobs, zero)
        ref_logprobs = torch.where(keep, ref_logprobs, zero)
        ratio = torch.exp(logprobs - prev_logprobs)
        clipped = torch.clamp(ratio, 1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high)
        loss = self.loss_agg_func(
            torch.maximum(-advantages * ratio, -advantages * clipped), loss_mask
        )
        if self.kl_beta > 0 and ref_logprobs is not None:
            kld = kl_penalty(ref_logprobs, logprobs, self.kl_penalty_type)
            loss = loss + self.kl_beta * self.loss_agg_func(kld, loss_mask)
        return loss


def rlinf_actor(logprobs, prev_logprobs, ref_logprobs, advantages, loss_mask, kl_beta=0.01):
    """The reference is given where the policy belongs.

    After RLinf/RLinf#1400.

    All tensors [B, T].
    """
    return FSDPActor(kl_beta=kl_beta).run_loss(
        logprobs, prev_logprobs, ref_logprobs, advantages, loss_mask
    )


def fast_masked_mean(values, mask):
    return (values * mask).sum() / mask.sum().clamp(min=1)


def grpo_fast_step(
    new_logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    response_masks,
    per_device_train_batch_size=2,
    beta=0.01,
    clip_lower=0.2,
    clip_higher=0.272,
):
    """Token-mean GRPO loss of one optimiser step, accumulated over micro-batches.

    Each micro-batch is divided by its own tokens.

    After allenai/open-instruct#1161.

    new_logprobs, old_logprobs, ref_logprobs, response_masks: [B, T]; advantages: [B].
    """
    rows = range(0, new_logprobs.size(0), per_device_train_batch_size)
    total = new_logprobs.new_zeros(())
    for start in rows:
        mb = slice(start, start + per_device_train_batch_size)
        keep = response_masks[mb].bool()
        zero = torch.zeros_like(new_logprobs[mb])
        logprobs = torch.where(keep, new_logprobs[mb], zero)
        ratio = torch.exp(logprobs - torch.where(keep, old_logprobs[mb], zero))
        adv = advantages[mb].unsqueeze(-1)
        pg_losses = -adv * ratio
        pg_losses2 = -adv * torch.clamp(ratio, 1.0 - clip_lower, 1.0 + clip_higher)
        kl = 0.5 * (logprobs - torch.where(keep, ref_logprobs[mb], zero)).square()
        loss = fast_masked_mean(
            torch.max(pg_losses, pg_losses2) + beta * kl, keep.to(logprobs.dtype)
        )
        total = total + loss / len(rows)
    return total


def video_grpo(per_token_logps, ref_per_token_logps, advantages, completion_mask, beta=0.04):
    """The log-ratio is clamped at one nat before k3.

    After tulerfeng/Video-R1#67.

    per_token_logps, ref_per_token_logps, completion_mask: [B, T]; advantages: [B].
    """
    keep = completion_mask.bool()
    per_token_logps = torch.where(keep, per_token_logps, torch.zeros_like(per_token_logps))
    ref_per_token_logps = torch.where(keep, ref_per_token_logps, torch.zeros_like(per_token_logps))

    x_clamped = torch.clamp(ref_per_token_logps - per_token_logps, min=-1, max=1)
    per_token_kl = torch.exp(x_clamped) - x_clamped - 1

    per_token_loss = torch.exp(per_token_logps - per_token_logps.detach()) * advantages.unsqueeze(1)
    per_token_loss = -(per_token_loss - beta * per_token_kl)
    loss = (per_token_loss * completion_mask).sum() / completion_mask.sum().clamp(min=1)
    mean_kl = ((per_token_kl * completion_mask).sum() / completion_mask.sum().clamp(min=1)).item()
    return loss, {"kl": mean_kl}


def selective_log_softmax(logits, index):
    return torch.log_softmax(logits, dim=-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def shift_tensor_left(x):
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def shift_logits(logits):
    return torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], dim=1)


def prime_rl_loss(
    logits,
    ref_logits,
    input_ids,
    inference_logprobs,
    advantages,
    loss_mask,
    temperature=1.0,
    clip_low=0.2,
    clip_high=0.28,
    kl_tau=0.01,
):
    """The policy's log-probs are of the next token, all others of the token.

    After PrimeIntellect-ai/prime-rl#1525.

    logits, ref_logits: [B, T, V], the model's raw outputs (position t predicts token t + 1).
    input_ids, inference_logprobs, advantages, loss_mask: [B, T], entry t belongs to token t;
    token 0 is prompt.
    """
    with torch.no_grad():
        ref_logprobs = selective_log_softmax(shift_logits(ref_logits) / temperature, input_ids)
    labels = shift_tensor_left(input_ids)
    trainer_logprobs = selective_log_softmax(logits / temperature, labels)

    keep = loss_mask.bool()
    log_ratio = torch.where(
        keep, trainer_logprobs - inference_logprobs, torch.zeros_like(trainer_logprobs)
    )
    ratio = log_ratio.exp()
    pg = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    kl = 0.5 * (trainer_logprobs - ref_logprobs).square()
    loss = torch.where(keep, pg + kl_tau * kl, torch.zeros_like(pg)).sum() / loss_mask.sum().clamp(
        min=1
    )
    return loss, {"mismatch_kl": (-log_ratio).detach()[keep].mean().item()}


@dataclass
class OnlineConfig:
    temperature: float = 0.7
    kl_coef: float = 0.05
    policy_clip_ratio: float = 0.2


def compose_online(batch, config=OnlineConfig()):  # noqa: B008
    """The policy's logits are divided by the temperature, the reference's are not.

    After databricks/compose-rl#105.

    batch: logits, ref_logits [B, T, V]; actions, old_log_probs, advantages, action_mask [B, T]
    (aligned).
    """
    mask = batch["action_mask"].to(batch["logits"].dtype)
    logits = batch["logits"] / config.temperature
    all_log_probs = torch.log_softmax(logits, dim=-1)
    log_probs = all_log_probs.gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)

    with torch.no_grad():
        ref_all_log_probs = torch.log_softmax(batch["ref_logits"], dim=-1)

    ratio = torch.exp(
        torch.where(mask.bool(), log_probs - batch["old_log_probs"], torch.zeros_like(log_probs))
    )
    adv = batch["advantages"]
    policy_loss = torch.max(
        -adv * ratio, -adv * ratio.clamp(1 - config.policy_clip_ratio, 1 + config.policy_clip_ratio)
    )
    online_ift_kl = (all_log_probs.exp() * (all_log_probs - ref_all_log_probs)).sum(-1)
    denominator = mask.sum().clamp(min=1)
    loss = ((policy_loss + config.kl_coef * online_ift_kl) * mask).sum() / denominator
    return {"total": loss, "kl": ((online_ift_kl.detach() * mask).sum() / denominator)}


PPO_RAY_CONFIG = SimpleNamespace(
    use_kl_in_reward=True, use_kl_loss=True, kl_coef=0.05, clip_ratio=0.2
)


def apply_kl_penalty(token_level_scores, old_log_prob, ref_log_prob, response_mask, kl_coef):
    kld = torch.where(
        response_mask.bool(), old_log_prob - ref_log_prob, torch.zeros_like(old_log_prob)
    )
    return (token_level_scores - kl_coef * kld) * response_mask


def compute_reinforce_outcome_advantage(token_level_rewards, response_mask):
    returns = torch.flip(torch.cumsum(torch.flip(token_level_rewards, dims=[1]), dim=1), dims=[1])
    return returns * response_mask


def ppo_ray_step(
    log_prob, old_log_prob, ref_log_prob, token_level_scores, response_mask, config=PPO_RAY_CONFIG
):
    """Expected score less kl_coef times the KL, which is in the reward and in the loss.

    After verl-project/verl#211.

    All tensors [B, T]; sum over tokens, mean over rows.
    """
    old_log_prob, ref_log_prob = old_log_prob.detach(), ref_log_prob.detach()
    if config.use_kl_in_reward:
        rewards = apply_kl_penalty(
            token_level_scores, old_log_prob, ref_log_prob, response_mask, config.kl_coef
        )
    else:
        rewards = token_level_scores * response_mask
    advantages = compute_reinforce_outcome_advantage(rewards, response_mask)

    keep = response_mask.bool()
    ratio = torch.exp(torch.where(keep, log_prob - old_log_prob, torch.zeros_like(log_prob)))
    pg = torch.max(
        -advantages * ratio, -advantages * ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio)
    )
    loss = (pg * response_mask).sum(-1).mean()
    if config.use_kl_loss:
        gap = torch.where(keep, log_prob - ref_log_prob, torch.zeros_like(log_prob))
        loss = loss + config.kl_coef * (0.5 * gap.square()).sum(-1).mean()
    return loss


def token_approx_kl(log_probs, log_probs_base, action_mask=None):
    log_ratio = log_probs - log_probs_base
    if action_mask is not None:
        log_ratio = torch.where(action_mask.bool(), log_ratio, torch.zeros_like(log_ratio))
    return log_ratio


def compute_reward(r, kl_coef, kl, action_mask, reward_clip_range=None):
    if reward_clip_range:
        r = r.clamp(min=reward_clip_range[0], max=reward_clip_range[1])
    kl_reward = kl_coef * kl
    eos_indices = action_mask.size(1) - 1 - action_mask.long().fliplr().argmax(dim=1, keepdim=True)
    last_reward = torch.zeros_like(kl).scatter_(
        dim=1, index=eos_indices, src=r.unsqueeze(1).to(kl.dtype)
    )
    return last_reward + kl_reward


def compute_token_rewards(
    action_log_probs, base_action_log_probs, reward, action_mask, init_kl_coef=0.01
):
    """k1 is added to the reward.

    After qiancheng0/ToolRL#52.

    action_log_probs, base_action_log_probs, action_mask: [B, T]; reward: [B]. Returns [B, T],
    undiscounted.
    """
    with torch.no_grad():
        kl = token_approx_kl(action_log_probs, base_action_log_probs, action_mask)
        rewards = compute_reward(reward, init_kl_coef, kl, action_mask)
        returns = rewards.flip(1).cumsum(1).flip(1)
    return returns * action_mask


class GRPOTrainer:
    def __init__(self, group_num=4, kl_coef=0.04, clip_eps=0.2, max_gen_len=64, epsilon=1e-4):
        self.group_num = group_num
        self.kl_coef = kl_coef
        self.clip_eps = clip_eps
        self.max_gen_len = max_gen_len
        self.epsilon = epsilon

    def grpo_advantage(self, rewards):
        """rewards: [prompts * group_num], a prompt's answers side by side."""
        grouped = rewards.float().view(-1, self.group_num)
        mean = grouped.mean(dim=0, keepdim=True)
        std = grouped.std(dim=0, keepdim=True, unbiased=False)
        return ((grouped - mean) / (std + self.epsilon)).view(-1)

    def loss(self, pi_logprobs, pi_old_logprobs, pi_ref_logprobs, rewards, gen_masks):
        keep = gen_masks.bool()
        zero = torch.zeros_like(pi_logprobs)
        advantages = self.grpo_advantage(rewards).to(pi_logprobs.dtype)[:, None]
        ratio = torch.exp(torch.where(keep, pi_logprobs - pi_old_logprobs, zero))
        policy = torch.min(
            ratio * advantages, ratio.clamp(1 - self.clip_eps, 1 + self.clip_eps) * advantages
        )
        kl = 0.5 * torch.where(keep, pi_logprobs - pi_ref_logprobs, zero).square()
        per_token = torch.where(keep, -policy + self.kl_coef * kl, zero)
        return per_token.sum() / (pi_logprobs.size(0) * self.max_gen_len)


def grpo_flat(
    pi_logprobs, pi_old_logprobs, pi_ref_logprobs, rewards, gen_masks, group_num=4, kl_coef=0.04
):
    """Advantages are relative to answers of other prompts.

    After XU-YIJIE/grpo-flat#2.

    Log-probs and gen_masks [B, T], rewards [B]; group-relative advantages.
    """
    trainer = GRPOTrainer(group_num=group_num, kl_coef=kl_coef)
    return trainer.loss(pi_logprobs, pi_old_logprobs, pi_ref_logprobs, rewards, gen_masks)


class SimpleGRPOLoss(nn.Module):
    """GRPO for asynchronous rollouts (the generator may be several steps behind the trainer)."""

    def __init__(self, clip_low=0.2, clip_high=0.28, beta=0.1):
        super().__init__()
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.beta = beta

    def forward(self, logprobs, ref_logprobs, generator_logprobs, advantages, padding_mask):
        mask = padding_mask.to(logprobs.dtype)
        keep = padding_mask.bool()
        zero = torch.zeros_like(logprobs)
        logprobs = torch.where(keep, logprobs, zero)
        kl = 0.5 * (logprobs - torch.where(keep, ref_logprobs, zero)).square()
        ratio = torch.exp(logprobs - logprobs.detach())
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        policy = torch.min(ratio * advantages, clipped * advantages)
        with torch.no_grad():
            lag = (torch.where(keep, generator_logprobs, zero) - logprobs).mul(
                mask
            ).sum() / mask.sum().clamp(min=1)
        loss = ((self.beta * kl - policy) * mask).sum() / mask.sum().clamp(min=1)
        return loss, {"generator_lag": lag.item()}


def simple_grpo(logprobs, ref_logprobs, generator_logprobs, advantages, padding_mask, beta=0.1):
    """The ratio is to the policy's own log-probs, though the samples are stale.

    After meta-pytorch/torchforge#571.

    logprobs, ref_logprobs, generator_logprobs, padding_mask: [B, T]; advantages: [B, 1].
    """
    return SimpleGRPOLoss(beta=beta)(
        logprobs, ref_logprobs, generator_logprobs, advantages, padding_mask
    )


class JSDivergence(nn.Module):
    """Generalised JSD: 0 is the forward KL(teacher || student), 1 the reverse KL(student ||
    teacher)."""

    def __init__(self, beta=1.0):
        super().__init__()
        self.beta = min(max(float(beta), 1e-6), 1.0 - 1e-6)

    def forward(self, student_logits, teacher_logits):
        q = torch.log_softmax(student_logits, dim=-1)
        p = torch.log_softmax(teacher_logits.detach(), dim=-1)
        m = torch.logaddexp(p + math.log(self.beta), q + math.log1p(-self.beta))
        kl_pm = (p.exp() * (p - m)).sum(-1)
        kl_qm = (q.exp() * (q - m)).sum(-1)
        return self.beta * kl_pm + (1 - self.beta) * kl_qm


def megatron_jsd(student_logits, teacher_logits, loss_mask, beta=1.0, distill_coef=1.0):
    """The mixture of a generalised JSD is clamped, where it is 1 by default.

    After verl-project/verl-recipe#151.

    student_logits, teacher_logits: [B, T, V]; loss_mask: [B, T].
    """
    per_token = JSDivergence(beta)(student_logits, teacher_logits)
    return distill_coef * (per_token * loss_mask).sum() / loss_mask.sum().clamp(min=1)


def topk_reverse_kl(student_topk_log_probs, teacher_topk_log_probs):
    w = student_topk_log_probs.exp()
    w = w / w.sum(-1, keepdim=True)
    return (w * (student_topk_log_probs - teacher_topk_log_probs)).sum(-1)


def apply_opd_kl_to_advantages(
    advantages, student_topk_log_probs, teacher_topk_log_probs, loss_masks, opd_kl_coef
):
    with torch.no_grad():
        reverse_kl = topk_reverse_kl(student_topk_log_probs, teacher_topk_log_probs)
        return advantages - opd_kl_coef * reverse_kl * loss_masks


def opd_policy_loss(
    log_probs,
    old_log_probs,
    advantages,
    student_topk_log_probs,
    teacher_topk_log_probs,
    loss_masks,
    opd_kl_coef=1.0,
    eps_clip=0.2,
    eps_clip_high=0.28,
):
    """The KL of a state is taken off the advantage of whatever was drawn there.

    After radixark/miles#2362.

    log_probs, old_log_probs, advantages, loss_masks: [B, T].

    student_topk_log_probs, teacher_topk_log_probs: [B, T, K], both on the student's K likeliest
    tokens.
    """
    advantages = apply_opd_kl_to_advantages(
        advantages, student_topk_log_probs, teacher_topk_log_probs, loss_masks, opd_kl_coef
    )
    keep = loss_masks.bool()
    ppo_kl = torch.where(keep, old_log_probs - log_probs, torch.zeros_like(log_probs))
    ratio = (-ppo_kl).exp()
    pg_losses1 = -ratio * advantages
    pg_losses2 = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    pg_loss = torch.maximum(pg_losses1, pg_losses2)
    return (pg_loss * loss_masks).sum() / loss_masks.sum().clamp(min=1)


def grpo_clip_kl(
    per_token_logps,
    old_per_token_logps,
    ref_per_token_logps,
    advantages,
    completion_mask,
    beta=0.04,
    epsilon_low=0.2,
    epsilon_high=0.2,
    kl_log_ratio_clip=10.0,
    max_completion_length=32,
):
    """The log-ratio of the KL overwrites the policy's.

    After huggingface/trl#6637.

    Log-probs and completion_mask: [B, T]; advantages: [B].
    """
    mask = completion_mask.to(per_token_logps.dtype)
    keep = completion_mask.bool()
    zero = torch.zeros_like(per_token_logps)
    log_ratio = torch.where(keep, per_token_logps - old_per_token_logps, zero)

    if beta != 0.0:
        log_ratio = torch.where(keep, ref_per_token_logps - per_token_logps, zero)
        if kl_log_ratio_clip is not None:
            log_ratio = log_ratio.clamp(-kl_log_ratio_clip, kl_log_ratio_clip)
        per_token_kl = 0.5 * log_ratio.square()

    coef_1 = torch.exp(log_ratio)
    coef_2 = torch.clamp(coef_1, 1 - epsilon_low, 1 + epsilon_high)
    advantages = advantages.unsqueeze(1)
    per_token_loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
    if beta != 0.0:
        per_token_loss = per_token_loss + beta * per_token_kl
    return (per_token_loss * mask).sum() / (per_token_loss.size(0) * max_completion_length)
