"""TRL, and what is built on it or after it."""

from __future__ import annotations

from torch import Tensor

from analysis.chapters.ch14_frameworks.trainers.formulas import (
    clamped_k3,
    left_out,
    value,
    whole_answer,
)
from analysis.chapters.ch14_frameworks.trainers.registry import charge, loss
from kl_term.kl.estimators import k1, k3

FLAG = "use_bias_correction_kl"


@loss(
    "TRL huggingface/trl trl/trainer/grpo_trainer.py 1.16.0 2026-11-26",
    {FLAG: {"bias_correction": True}, "without": {"bias_correction": False}},
    beta=0,
    flag="GRPOConfig.use_bias_correction_kl",
    since="1.10.0",
    remark="Level sequence puts the sequence's ratio on a token's KL.",
    threads=(
        "huggingface/trl#6503 merged",
        "huggingface/trl#6586 open",
        "huggingface/trl#7188 open",
    ),
)
def trl_grpo(
    logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, bias_correction: bool, level: str = "token"
) -> Tensor:
    """k3, times the live ratio if ``use_bias_correction_kl``, at level ``sequence`` its
    geometric mean over the last axis; Liger's fused loss computes the same."""
    kl = k3(logp, ref_logp)
    if not bias_correction:
        return kl
    log_ratio = logp - old_logp
    if level == "sequence":
        log_ratio = log_ratio.mean(-1, keepdim=True)
    return kl * log_ratio.exp()


@charge(
    "TRL huggingface/trl trl/trainer/rloo_trainer.py 1.16.0 2026-11-26",
    {"RLOO": {}},
    beta=0.05,
    flag="RLOOConfig.beta",
    divisor="seq_mean_token_sum",
    remark="k3 in its place would no longer be the gradient of a KL.",
    threads=(
        "huggingface/trl#7086 open",
        "huggingface/trl#7096 open",
        "huggingface/trl#7095 closed",
        "huggingface/trl#5889 closed",
    ),
)
def trl_rloo(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """k1 summed over the answer, inside the leave-one-out."""
    return left_out(whole_answer(k1(logp, ref_logp), mask))


@loss(
    "Liger linkedin/Liger-Kernel liger_kernel/chunked_loss/grpo_loss.py 0.8.5 2026-11-26",
    {"default": {"bias_correction": False}, FLAG: {"bias_correction": True}},
    beta=0.04,
    flag="use_bias_correction_kl",
    remedy="use_bias_correction_kl=True",
    cure=FLAG,
)
def liger(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, bias_correction: bool) -> Tensor:
    """TRL's term with TRL's flag, off."""
    return trl_grpo(logp, ref_logp, old_logp, bias_correction=bias_correction)


@loss(
    "Unsloth unslothai/unsloth-zoo unsloth_zoo/rl_replacements.py 2026.10.9 2026-11-26",
    {f"{FLAG}, TRL 1.10 on": {"bias_correction": True}, "older TRL": {"bias_correction": False}},
    beta=0,
    flag="TRL's",
    since="PR 890; before, the flag was ignored",
    threads=("unslothai/unsloth-zoo#890 merged",),
)
def unsloth(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, bias_correction: bool) -> Tensor:
    """TRL's, from a log-ratio within 20; the product is clamped at 10, its ratio with it."""
    kl = value("k3", (logp - ref_logp).clamp(-20, 20))
    if bias_correction:
        kl = kl * (logp - old_logp).exp()
    return kl.clamp(-10, 10)


@loss(
    "Axolotl axolotl-ai-cloud/axolotl axolotl/core/trainers/grpo/async_trainer.py 0.19.0 "
    "2026-11-26",
    {"default": {"bias_correction": False}, FLAG: {"bias_correction": True}},
    beta=0,
    flag="trl.use_bias_correction_kl",
    since="0.16.0",
    remark="It pins TRL 1.9.0, whose default was off too.",
    remedy="trl: {use_bias_correction_kl: true}",
    cure=FLAG,
)
def axolotl(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, bias_correction: bool) -> Tensor:
    """The asynchronous trainer's copy of TRL's term."""
    return trl_grpo(logp, ref_logp, old_logp, bias_correction=bias_correction)


@loss(
    "ms-swift modelscope/ms-swift swift/rlhf_trainers/grpo_trainer.py 4.6.0 2026-11-26",
    {
        "default": {"engine_weight": False},
        "rollout_importance_sampling_mode=token_truncate": {"engine_weight": True},
    },
    beta=0.04,
    divisor="seq_mean_token_mean",
    flag="--beta",
    since="3.1.1; the engine's weight since 3.11.0",
    remark="The engine's weight is detached: under it, k3 is the forward KL at any age.",
    remedy="--kl_in_reward true --loss_type dapo",
)
def ms_swift(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, engine_weight: bool) -> Tensor:
    """k3 with both clamps; the weight of trainer over engine, at most 2, is detached. The sampler
    here is the engine."""
    kl = clamped_k3(logp - ref_logp)
    return kl * (logp - old_logp).exp().clamp(max=2).detach() if engine_weight else kl


@charge(
    "ms-swift modelscope/ms-swift swift/rlhf_trainers/grpo_trainer.py 4.6.0 2026-11-26",
    {"kl_in_reward, rloo": {}},
    beta=0,
    divisor="seq_mean_token_mean",
    flag="--kl_in_reward, on with --advantage_estimator rloo",
)
def ms_swift_reward(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """k1 summed over the answer, inside the leave-one-out."""
    return left_out(whole_answer(k1(logp, ref_logp), mask))
