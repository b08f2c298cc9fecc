"""The trainers of the PyTorch project: torchrl, torchforge, torchtune."""

from __future__ import annotations

from torch import Tensor

from analysis.chapters.ch14_frameworks.trainers.registry import loss
from kl_term.kl.estimators import k3


@loss(
    "torchrl pytorch/rl torchrl/objectives/llm/grpo.py 0.14.1 2026-11-26",
    {"kl_to_ref_coeff": {}},
    beta=0,
    divisor="padded_mean",
    flag="GRPOLoss(kl_to_ref_coeff=...)",
    since="0.9.0",
    remark="Masked tokens are zeroed and still counted, so padding dilutes the KL.",
    remedy="kl_penalty = 0.5 * diff[mask].square().mean()",
)
def torchrl(logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
    """k3."""
    del old_logp
    return k3(logp, ref_logp)


@loss(
    "torchrl-distillation pytorch/rl torchrl/objectives/llm/distillation.py 0.14.1 2026-11-26",
    {'kl_direction="reverse"': {}},
    beta=1,
    divisor="seq_mean_token_mean",
    flag="DistillationLoss(kl_direction=...)",
    since="0.14",
    remark="Its documentation says in a note that the descent is the forward KL's.",
    remedy="kl = 0.5 * (tlp - lp).square() under the name reverse",
    threads=("pytorch/rl#4038 merged",),
)
def torchrl_distillation(logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
    """k3, the teacher in the reference's place."""
    del old_logp
    return k3(logp, ref_logp)


@loss(
    "torchforge meta-pytorch/torchforge src/forge/losses/grpo_loss.py 6e77f0b 2025-11-15",
    {"default": {}},
    beta=0.1,
    divisor="seq_mean_token_mean",
    flag="SimpleGRPOLoss(beta=...)",
    since="0.1.0",
    remark="No clamp: a logged KL of billions was one token.",
    remedy="kl = 0.5 * (logprobs - ref_logprobs).square()",
    threads=("meta-pytorch/torchforge#664 closed",),
)
def torchforge(logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
    """k3."""
    del old_logp
    return k3(logp, ref_logp)


@loss(
    "torchtune pytorch/torchtune torchtune/dev/grpo/loss.py bd2a0fc 2026-04-23",
    {"GRPOSimpleLoss": {}},
    beta=0.1,
    divisor="seq_mean_token_mean",
    flag="kl_coeff",
    since="2025-02-21, in no release",
    remark="GRPOLoss beside it averages over tokens.",
    remedy="per_token_kl = 0.5 * (pi_logprobs - ref_logprobs.detach()).square()",
)
def torchtune(logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
    """k3."""
    del old_logp
    return k3(logp, ref_logp)
