"""Broken losses of the fifth set held out, by somebody who had not seen the audit."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class CispoConfig:
    kl_coef: float = 0.01
    eps_high: float = 3.0
    max_new_tokens: int = 8


def cispo_objective(batch: dict, cfg: CispoConfig):
    """CISPO: the importance weight, truncated from above, scales the REINFORCE term of every token.

    batch: logprobs, old_logprobs, ref_logprobs, loss_mask [B, T]; advantages [B].
    The sum over tokens is divided by rows x max_new_tokens. Returns (loss, metrics).
    """
    keep = batch["loss_mask"].bool()
    logp = batch["logprobs"].masked_fill(~keep, 0.0)
    old = batch["old_logprobs"].detach().masked_fill(~keep, 0.0)
    ref = batch["ref_logprobs"].detach().masked_fill(~keep, 0.0)
    adv = batch["advantages"].detach().unsqueeze(-1)

    weight = torch.exp(logp - old).clamp(max=1.0 + cfg.eps_high)
    per_token = -weight * adv * logp
    if cfg.kl_coef != 0.0:
        per_token = per_token + cfg.kl_coef * 0.5 * (logp - ref).square()

    scale = logp.size(0) * cfg.max_new_tokens
    loss = (per_token * keep).sum() / scale
    metrics = {
        "weight_mean": (weight.detach() * keep).sum() / keep.sum(),
        "truncated": ((weight.detach() >= 1.0 + cfg.eps_high) & keep).sum() / keep.sum(),
    }
    return loss, metrics


def low_var_kl(log_prob: torch.Tensor, ref_log_prob: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 for each token; non-negative."""
    delta = ref_log_prob - log_prob
    ratio = torch.exp(delta.detach().clamp(max=20.0))
    return ratio - delta - 1.0


def actor_kl_loss(
    log_prob: torch.Tensor,
    ref_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    kl_loss_coef: float = 0.001,
    max_response_length: int = 8,
):
    """kl_loss_coef times the KL penalty to the reference: token sum over a fixed length, mean over
    rows.
    """
    valid = response_mask.bool()
    log_prob = torch.where(valid, log_prob, torch.zeros_like(log_prob))
    ref_log_prob = torch.where(valid, ref_log_prob, torch.zeros_like(ref_log_prob))
    kld = low_var_kl(log_prob, ref_log_prob.detach())
    per_row = (kld * valid).sum(-1) / max_response_length
    return kl_loss_coef * per_row.mean()


@dataclass
class ActorBatch:
    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    ref_log_probs: torch.Tensor
    advantages: torch.Tensor
    action_mask: torch.Tensor


def masked_mean(x, mask):
    return x.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


class PPOActorLoss:
    """Clipped surrogate plus kl_coef times the KL (k2) to the frozen model, both as token means.

    After allenai/open-instruct#530.
    """

    def __init__(self, kl_coef: float = 0.05, clip_eps: float = 0.2):
        self.kl_coef = kl_coef
        self.clip_eps = clip_eps

    def __call__(self, batch: ActorBatch) -> dict[str, torch.Tensor]:
        mask = batch.action_mask.bool()
        log_ratio = (batch.log_probs - batch.old_log_probs.detach()).masked_fill(~mask, 0.0)
        ratio = log_ratio.exp()
        advantages = batch.advantages.detach().masked_fill(~mask, 0.0)
        unclipped = ratio * advantages
        clipped = ratio.clamp(1 - self.clip_eps, 1 + self.clip_eps) * advantages
        kl = 0.5 * (batch.log_probs - batch.ref_log_probs.detach()).masked_fill(~mask, 0.0) ** 2

        metrics = {
            "actor/pg_loss": masked_mean(-torch.min(unclipped, clipped), mask),
            "actor/kl": masked_mean(kl, mask).detach(),
            "actor/approx_kl": masked_mean(-log_ratio, mask).detach(),
            "actor/clipfrac": masked_mean((clipped < unclipped).float(), mask).detach(),
        }
        loss = metrics["actor/pg_loss"] + self.kl_coef * metrics["actor/kl"]
        return {"loss": loss, **metrics}


def async_policy_loss(
    logprobs,
    behavior_logprobs,
    ref_logprobs,
    advantages,
    loss_mask,
    beta: float = 0.02,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    num_tokens: float | None = None,
):
    """Decoupled-clip loss with the off-policy KL of DeepSeek-V3.2.

    Each token's k3 is multiplied by its importance ratio to the behaviour policy, which makes the
    gradient that of the reverse KL although the tokens are stale. num_tokens: tokens of the whole
    step (default: of this call). All tensors [B, T].
    """
    mask = loss_mask.bool()
    n = num_tokens if num_tokens is not None else mask.sum().clamp(min=1)

    advantages, ref_logprobs = advantages.detach(), ref_logprobs.detach()
    log_ratio = (logprobs - behavior_logprobs.detach()).masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()
    surrogate = torch.minimum(
        ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    )

    gap = (ref_logprobs - logprobs).masked_fill(~mask, 0.0)
    k3 = gap.expm1() - gap
    is_weight = ratio.detach()
    kl = is_weight * k3

    return (-surrogate + beta * kl).masked_fill(~mask, 0.0).sum() / n


@dataclass
class DAPOArgs:
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float = 0.28


class DAPOTrainer:
    def __init__(self, args: DAPOArgs = None):
        self.args = args or DAPOArgs()
        self.metrics = {}

    def compute_loss(self, inputs: dict) -> torch.Tensor:
        """Token-level loss with the higher upper clip; an optional KL (k2) to the reference.

        inputs: per_token_logps, old_per_token_logps, ref_per_token_logps, completion_mask [B, T],
        advantages [B], num_items_in_batch (optional number of completion tokens of the whole step).
        """
        a = self.args
        mask = inputs["completion_mask"].bool()
        logps = torch.where(mask, inputs["per_token_logps"], 0.0)
        old = torch.where(mask, inputs["old_per_token_logps"].detach(), 0.0)
        ref = torch.where(mask, inputs["ref_per_token_logps"].detach(), 0.0)
        advantages = inputs["advantages"].detach()[:, None]

        log_importance = logps - old
        coef_1 = log_importance.exp()
        coef_2 = torch.clamp(log_importance, 1 - a.epsilon, 1 + a.epsilon_high).exp()
        per_token_loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
        if a.beta:
            per_token_loss = per_token_loss + a.beta * (logps - ref).pow(2) / 2

        items = inputs.get("num_items_in_batch") or mask.sum().clamp(min=1)
        return (per_token_loss * mask).sum() / items


def dapo_compute_loss(inputs, args=DAPOArgs()):  # noqa: B008
    """Token-level loss with the higher upper clip; an optional KL (k2) to the reference."""
    return DAPOTrainer(args).compute_loss(inputs)


class TruncatedISLoss(nn.Module):
    """PPO clip against the trainer's old policy, times the truncated weight trainer / engine (TIS).

    The weight exp(old - rollout) carries no gradient and is truncated at tis_cap. The KL to the
    reference is k2. Token sums are divided by global_tokens (default: the tokens of the call).
    """

    def __init__(self, kl_loss_coef: float = 0.001, clip: float = 0.2, tis_cap: float = 2.0):
        super().__init__()
        self.kl_loss_coef = kl_loss_coef
        self.clip = clip
        self.tis_cap = tis_cap

    def forward(
        self,
        log_probs,
        old_log_probs,
        rollout_log_probs,
        ref_log_probs,
        advantages,
        response_mask,
        global_tokens=None,
    ):
        m = response_mask.to(log_probs.dtype)
        drop = m == 0
        old_log_probs, ref_log_probs, advantages = (
            x.detach() for x in (old_log_probs, ref_log_probs, advantages)
        )
        ratio = (log_probs - old_log_probs).masked_fill(drop, 0.0).exp()
        pg = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - self.clip, 1 + self.clip))

        with torch.no_grad():
            tis = (old_log_probs - rollout_log_probs).masked_fill(drop, 0.0).exp()
            tis = tis.clamp(min=self.tis_cap)
        pg = pg * tis

        kl = 0.5 * (log_probs - ref_log_probs).masked_fill(drop, 0.0).square()
        denom = m.sum().clamp(min=1) if global_tokens is None else global_tokens
        pg_loss = (pg.masked_fill(drop, 0.0)).sum() / denom
        kl_loss = (kl * m).sum() / denom
        return pg_loss + self.kl_loss_coef * kl_loss, {
            "pg_loss": pg_loss.detach(),
            "kl_loss": kl_loss.detach(),
        }


def segment_ids(cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """Index of the answer that each packed token belongs to. cu_seqlens = [0, n_0, n_0 + n_1,
    ...].
    """
    positions = torch.arange(total, device=cu_seqlens.device)
    return torch.bucketize(positions, cu_seqlens[1:]).clamp(max=cu_seqlens.numel() - 2)


def flat_grpo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kl_coef: float = 0.01,
    clip_ratio: float = 0.2,
    max_tokens: int = 8,
) -> torch.Tensor:
    """Clipped loss of a packed micro-batch; every token takes the advantage of its answer.

    logprobs, old_logprobs, ref_logprobs: [N]; advantages: [S]; divisor: answers x max_tokens. KL:
    k2.
    """
    seg = segment_ids(cu_seqlens, logprobs.numel())
    adv = advantages.detach().index_select(0, seg)
    ratio = (logprobs - old_logprobs.detach()).exp()
    pg = -torch.min(ratio * adv, ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * adv)
    kl = (logprobs - ref_logprobs.detach()).square().mul(0.5)
    answers = cu_seqlens.numel() - 1
    return (pg + kl_coef * kl).sum() / (answers * max_tokens)


def next_token_logps(logits: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Log-probability of input_ids[:, 1:]; the output has one entry less than the input."""
    return torch.gather(F.log_softmax(logits[:, :-1], dim=-1), 2, input_ids[:, 1:, None]).squeeze(2)


def causal_pg_loss(
    logits: torch.Tensor,
    ref_logits: torch.Tensor,
    input_ids: torch.Tensor,
    completion_mask: torch.Tensor,
    advantages: torch.Tensor,
    beta: float = 0.04,
) -> tuple[torch.Tensor, dict]:
    """On-policy gradient on the completion plus beta times the KL (k2) to the reference.

    logits, ref_logits: [B, L, V] over prompt and completion; input_ids [B, L]; completion_mask [B,
    L] is 1 on the tokens of input_ids that the policy wrote; advantages [B]. Sum over tokens, mean
    over rows.
    """
    logps = next_token_logps(logits, input_ids)
    with torch.no_grad():
        ref_logps = next_token_logps(ref_logits, input_ids)
    mask = completion_mask[:, :-1].to(logps.dtype)

    pg = -advantages.detach()[:, None] * torch.exp(logps - logps.detach())
    kl = 0.5 * (logps - ref_logps) ** 2
    per_row = (pg + beta * kl).masked_fill(mask == 0, 0.0).sum(dim=1)
    return per_row.mean(), {"kl": kl.detach()[mask > 0].sum().item() / max(mask.sum().item(), 1.0)}


def loss_fn(logps, ref_logps, advantages, mask, beta=0.04, gen_len=8):
    """On-policy GRPO loss with a KL penalty that keeps the policy near the reference.

    logps: log-probabilities of the generated tokens under the model, ref_logps: under the frozen
    model, [B, T]. advantages: [B], mask: [B, T]. The sum over tokens is divided by gen_len.
    """
    keep = mask > 0
    logps = torch.where(keep, logps, torch.zeros_like(logps))
    ref_logps = torch.where(keep, ref_logps, torch.zeros_like(ref_logps)).detach()

    ratio = torch.exp(logps - logps.detach())
    policy = ratio * advantages.detach().view(-1, 1)
    kl = F.kl_div(logps, ref_logps, reduction="none", log_target=True)

    token_loss = -(policy - beta * kl)
    return (token_loss * keep).sum(-1).div(gen_len).mean()


class ChunkedGRPO:
    """Maximises the clipped surrogate, regularised by beta times the KL to the reference (k2).

    Call with logits and ref_logits [B, T, V] that are aligned with the tokens `selected` [B, T].

    After qiancheng0/ToolRL#52.
    """

    def __init__(
        self,
        beta: float = 0.04,
        eps: float = 0.2,
        chunk_size: int = 2,
        max_completion_length: int = 8,
    ):
        self.beta = beta
        self.eps = eps
        self.chunk_size = chunk_size
        self.max_completion_length = max_completion_length

    @staticmethod
    def select(logits, tokens):
        picked = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return picked - torch.logsumexp(logits, dim=-1)

    def objective(self, logits, ref_logits, tokens, old_logps, advantages, mask):
        keep = mask.bool()
        logps = self.select(logits[keep], tokens[keep])
        with torch.no_grad():
            ref_logps = self.select(ref_logits[keep], tokens[keep])
        ratio = torch.exp(logps - old_logps[keep].detach())
        adv = advantages.detach().unsqueeze(1).expand_as(mask)[keep]
        surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - self.eps, 1 + self.eps) * adv)
        penalty = 0.5 * (ref_logps - logps) ** 2
        return (surrogate + self.beta * penalty).sum()

    def __call__(self, logits, ref_logits, selected, old_logps, advantages, mask):
        total = logits.new_zeros(())
        for rows in torch.arange(logits.size(0)).split(self.chunk_size):
            total = total + self.objective(
                logits[rows],
                ref_logits[rows],
                selected[rows],
                old_logps[rows],
                advantages[rows],
                mask[rows],
            )
        return -total / (logits.size(0) * self.max_completion_length)


@dataclass
class ClipRange:
    low: float = 3e-4
    high: float = 4e-4


@dataclass
class GSPOConfig:
    kl_beta: float = 0.01
    clip: ClipRange = field(default_factory=ClipRange)


def gspo_policy_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    ref_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    advantages: torch.Tensor,
    config: GSPOConfig,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequence ratio = exp of the length-normalised log-ratio of the answer; one clip for each
    answer.

    advantages: [B]. KL: k2, mean over the answer's tokens. Returns (loss, policy loss, kl).
    """
    mask = response_mask.to(log_prob.dtype)
    advantages = advantages.detach()
    log_ratio = torch.where(mask > 0, log_prob - old_log_prob.detach(), 0.0)
    seq_ratio = log_ratio.mean(dim=-1).exp()
    clipped = seq_ratio.clamp(1 - config.clip.low, 1 + config.clip.high)
    pg = torch.maximum(-advantages * seq_ratio, -advantages * clipped).mean()

    gap = torch.where(mask > 0, log_prob - ref_log_prob.detach(), 0.0)
    kl = (0.5 * gap.square()).sum(-1) / mask.sum(-1).clamp(min=1)
    kl = kl.mean()
    return pg + config.kl_beta * kl, pg.detach(), kl.detach()


class KLShapedReward:
    """Token rewards r_t = -kl_coef (log pi - log ref), with the score of the answer on its last
    token.
    """

    def __init__(self, kl_coef: float = 0.05):
        self.kl_coef = kl_coef

    def non_score(self, logprobs, ref_logprobs, mask):
        return -self.kl_coef * torch.where(
            mask, logprobs - ref_logprobs, torch.zeros_like(logprobs)
        )

    @torch.no_grad()
    def __call__(self, scores, logprobs, ref_logprobs, action_mask):
        """scores [B]; logprobs, ref_logprobs, action_mask [B, T] -> token rewards [B, T]."""
        mask = action_mask.bool()
        non_score = self.non_score(logprobs, ref_logprobs, mask)
        rlhf_reward = scores + non_score.sum(1)

        last = mask.to(torch.long).cumsum(1).argmax(1)
        rewards = non_score.clone()
        rewards[torch.arange(rewards.size(0)), last] += rlhf_reward
        return rewards


@torch.no_grad()
def rloo_advantages(
    rewards: torch.Tensor,
    per_token_logps: torch.Tensor,
    ref_per_token_logps: torch.Tensor,
    completion_mask: torch.Tensor,
    num_generations: int = 2,
    beta: float = 0.05,
) -> torch.Tensor:
    """Leave-one-out advantages of the KL-penalised reward.

    rewards: [B], the answers of a prompt in consecutive rows; the other tensors [B, T].
    The penalty of an answer is beta times the sum of the (low-variance, non-negative) KL estimates
    of its tokens. Returns [B].

    After huggingface/trl#7086.
    """
    mask = completion_mask.bool()
    log_ratio = (ref_per_token_logps - per_token_logps).masked_fill(~mask, 0.0)
    kl = torch.expm1(log_ratio) - log_ratio
    penalised = rewards - beta * kl.sum(-1)

    grouped = penalised.view(-1, num_generations)
    baseline = (grouped.sum(1, keepdim=True) - grouped) / (num_generations - 1)
    return (grouped - baseline).flatten()


@dataclass(frozen=True)
class RewardConfig:
    kl_coef: float = 0.01


def compute_returns(batch: dict, cfg: RewardConfig) -> torch.Tensor:
    """Undiscounted return of each token, from token rewards with a KL penalty (k1).

    batch: scores [B]; log_probs, ref_log_probs, response_mask [B, T]. The score is paid at the last
    valid token. Returns [B, T], zero on padding, without gradient.
    """
    mask = batch["response_mask"].bool()
    with torch.no_grad():
        kl = (batch["log_probs"] - batch["ref_log_probs"]).masked_fill(~mask, 0.0)
        token_rewards = -cfg.kl_coef * kl
        lengths = mask.sum(dim=-1)
        token_rewards.scatter_add_(
            1, (lengths - 1).clamp(min=0)[:, None], batch["scores"][:, None].to(kl.dtype)
        )
        returns = token_rewards.cumsum(dim=-1)
    return returns.masked_fill(~mask, 0.0)


class TopKDistill(nn.Module):
    """coef times the reverse KL of student and teacher on the teacher's top k, sum over tokens /
    rows x length.

    student_logits [B, T, V]; teacher_topk_ids [B, T, k]; teacher_topk_logps [B, T, k]
    (log-probabilities over the whole vocabulary, not renormalised); response_mask [B, T].

    After verl-project/verl#7806.
    """

    def __init__(self, coef: float = 1.0, response_length: int = 8):
        super().__init__()
        self.coef = coef
        self.response_length = response_length

    def forward(self, student_logits, teacher_topk_ids, teacher_topk_logps, response_mask):
        keep = response_mask.bool()
        log_q = student_logits[keep].log_softmax(-1).gather(-1, teacher_topk_ids[keep])
        log_p = teacher_topk_logps[keep].detach()
        kl = (log_q.exp() * (log_q - log_p)).sum(-1)
        return self.coef * kl.sum() / (response_mask.size(0) * self.response_length)
