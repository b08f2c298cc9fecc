"""verl, and those whose loss or estimators came from it."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.chapters.ch14_frameworks.trainers.formulas import (
    ESTIMATORS_OF_VERL,
    charged,
    clamped_k3,
    own_token,
    to_go,
    verl_kinds,
)
from analysis.chapters.ch14_frameworks.trainers.registry import charge, loss
from kl_term.kl.estimators import k1, k2
from kl_term.kl.surrogates import straight_through


def _named(*kinds: str) -> dict[str, dict[str, str]]:
    return {kind: {"kind": kind} for kind in kinds}


@loss(
    "verl verl-project/verl verl/trainer/ppo/core_algos.py 0.9.1 2026-11-26",
    _named("low_var_kl", "low_var_kl+", "kl", "abs", "mse"),
    beta=0,
    flag="actor.use_kl_loss, actor.kl_loss_type",
    remedy='actor.kl_loss_type="low_var_kl+"',
    cure="low_var_kl+",
    threads=("verl-project/verl#2983 open", "verl-project/verl#211 closed"),
)
def verl(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """``kl``, ``abs``, ``mse`` or ``low_var_kl``, which clamps the log-ratio at 20 and its value
    at 10; with ``+``, that value and the gradient of k2."""
    del old_logp
    kl = verl_kinds(logp - ref_logp, kind.removesuffix("+"))
    return straight_through(kl, k2(logp, ref_logp)) if kind.endswith("+") else kl


@charge(
    "verl verl-project/verl verl/trainer/ppo/ray_trainer.py 0.9.1 2026-11-26",
    {f"kl, {name}": flags for name, flags in ESTIMATORS_OF_VERL.items()},
    beta=0,
    flag="algorithm.use_kl_in_reward, algorithm.kl_penalty, algorithm.adv_estimator",
    remark="The group's spread then divides reward and KL alike.",
)
def verl_reward(logp: Tensor, ref_logp: Tensor, mask: Tensor, **estimator: str) -> Tensor:
    """k1 through the advantage estimator; the division by a spread left out."""
    return charged(k1(logp, ref_logp), mask, **estimator)


@loss(
    "verl-distillation verl-project/verl verl/trainer/distillation/losses.py 0.9.1 2026-11-26",
    _named("k3", "kl", "mse", "abs"),
    beta=0,
    flag="distillation.distillation_loss.loss_mode, use_policy_gradient: false",
    since="0.8.0",
    remark="k1 is refused by name as a loss, with the right reason; its alias kl is not.",
    remedy="loss_mode: mse, or use_policy_gradient: true with k1",
    cure="mse",
    threads=(
        "verl-project/verl#7856 open",
        "verl-project/verl#7855 open",
        "verl-project/verl#7806 open",
    ),
)
def verl_distillation(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """The estimators of the KL loss, the teacher in the reference's place."""
    del old_logp
    return verl_kinds(logp - ref_logp, kind)


@charge(
    "verl-distillation verl-project/verl verl/workers/config/distillation.py 0.9.1 2026-11-26",
    _named("k3", "k1"),
    beta=0,
    flag="loss_mode, use_policy_gradient: true, the dataclass's default",
    since="0.8.0",
    remedy="loss_mode: k1",
    cure="k1",
)
def verl_distillation_reward(logp: Tensor, ref_logp: Tensor, mask: Tensor, *, kind: str) -> Tensor:
    """An estimator, clamped at 10, as the price of its own token."""
    return own_token(verl_kinds(logp - ref_logp, kind).clamp(-10, 10), mask)


@loss(
    "EasyR1 hiyouga/EasyR1 verl/trainer/core_algos.py b44b311 2026-07-30",
    {"low_var_kl, examples/config.yaml": {"kind": "low_var_kl"}, "kl": {"kind": "kl"}}
    | _named("abs", "mse"),
    beta=0.01,
    flag="algorithm.use_kl_loss, algorithm.kl_penalty",
    since="0.3.0",
    remark="The dataclass keeps kl, which as a loss does nothing.",
    remedy="algorithm.kl_penalty=mse",
    cure="mse",
    threads=("hiyouga/EasyR1#508 open", "hiyouga/EasyR1#45 closed"),
)
def easyr1(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """verl's kinds."""
    del old_logp
    return verl_kinds(logp - ref_logp, kind)


@charge(
    "EasyR1 hiyouga/EasyR1 verl/trainer/ray_trainer.py b44b311 2026-07-30",
    {f"kl, {name}": flags for name, flags in ESTIMATORS_OF_VERL.items()},
    beta=0.001,
    flag="algorithm.use_kl_loss: false, the dataclass's default",
    since="0.3.0",
    remark="The group's spread then divides reward and KL alike.",
)
def easyr1_reward(logp: Tensor, ref_logp: Tensor, mask: Tensor, **estimator: str) -> Tensor:
    """k1 through the advantage estimator; the division by a spread left out."""
    return charged(k1(logp, ref_logp), mask, **estimator)


@loss(
    "RAGEN mll-lab-nu/RAGEN ragen/workers/actor/dp_actor.py 20daedc 2026-04-14",
    _named("kl", "low_var_kl", "mse"),
    beta=0,
    flag="actor.use_kl_loss, actor.kl_loss_type",
    since="2025-04-18",
    remedy="actor_rollout_ref.actor.kl_loss_type=mse",
    cure="mse",
)
def ragen(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """verl's kinds, from its own actor."""
    del old_logp
    return verl_kinds(logp - ref_logp, kind)


@loss(
    "rLLM rllm-org/rllm rllm/trainer/verl/utils.py 9beb6e0 2026-08-15",
    {"low_var_kl": {}},
    beta=0,
    flag="rllm.algorithm.kl_beta",
    remark="It pins verl 0.8.0 and sets verl's KL loss from kl_beta.",
    remedy='actor_rollout_ref.actor.kl_loss_type="mse"',
)
def rllm(logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
    """verl's default."""
    del old_logp
    return clamped_k3(logp - ref_logp)


@charge(
    "rLLM rllm-org/rllm rllm/trainer/distill/advantage.py 9beb6e0 2026-08-15",
    {"distillation": {}},
    beta=1,
    flag="kl_penalty_coef of the distillation trainer",
)
def rllm_distillation(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """k1, clamped at 5, as the price of its own token."""
    return own_token(k1(logp, ref_logp).clamp(-5, 5), mask)


RLINF = ("low_var_kl", "kl", "mse", "abs")


@loss(
    "RLinf-FSDP RLinf/RLinf rlinf/workers/actor/fsdp_actor_worker.py a3816b5 2026-08-22",
    _named(*RLINF),
    beta=0,
    flag="algorithm.kl_beta, algorithm.kl_penalty_type",
    since="0.1, 2025-10-14; 0.3 has it too",
    remark="Policy and reference are in each other's place; its Megatron workers have them right.",
    remedy="kl_penalty(logprobs, ref_logprobs, ...), as in PR 1400, and kl_penalty_type: mse",
    cure="mse",
    threads=("RLinf/RLinf#1400 merged",),
)
def rlinf_fsdp(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """verl's kinds with policy and reference exchanged."""
    del old_logp
    return verl_kinds(ref_logp - logp, kind)


@loss(
    "RLinf-Megatron RLinf/RLinf rlinf/workers/actor/megatron_actor_worker.py a3816b5 2026-08-22",
    _named(*RLINF),
    beta=0,
    flag="algorithm.kl_beta, algorithm.kl_penalty_type",
    since="0.1",
    remedy="algorithm.kl_penalty_type: mse",
    cure="mse",
)
def rlinf_megatron(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """verl's kinds."""
    del old_logp
    return verl_kinds(logp - ref_logp, kind)


@charge(
    "RLinf RLinf/RLinf rlinf/algorithms/advantages.py a3816b5 2026-08-22",
    {"k2, the shipped REINFORCE++": {"kind": "k2"}, "kl": {"kind": "kl"}},
    beta=0.001,
    flag="algorithm.reinpp_kl_beta, algorithm.kl_penalty_type",
    remark="Of the REINFORCE++ example; the batch is whitened after it.",
    remedy="algorithm.kl_penalty_type: kl",
    cure="kl",
)
def rlinf_reward(logp: Tensor, ref_logp: Tensor, mask: Tensor, *, kind: str) -> Tensor:
    """An estimator, to go."""
    return to_go(verl_kinds(logp - ref_logp, kind), mask)


@loss(
    "SkyRL NovaSky-AI/SkyRL skyrl/backends/skyrl_train/utils/ppo_utils.py a956457 2026-08-21",
    _named("k3", "k1", "k2", "abs"),
    beta=0.001,
    divisor="seq_mean_token_mean",
    flag="trainer.algorithm.kl_estimator_type",
    since="skyrl_train 0.1.0",
    remark="The policy loss is a mean over tokens, the KL one over each answer's.",
    remedy='trainer.algorithm.kl_estimator_type="k2"',
    cure="k2",
    threads=("NovaSky-AI/SkyRL#805 open", "NovaSky-AI/SkyRL#1445 open"),
)
def skyrl(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """k1, abs, k2, or k3 with verl's clamps."""
    del old_logp
    return verl_kinds(logp - ref_logp, kind)


@charge(
    "SkyRL NovaSky-AI/SkyRL skyrl/train/trainer.py a956457 2026-08-21",
    _named("k3", "k1", "k2")
    | {
        f"k3, {name}": {"kind": "k3", **flags}
        for name, flags in ESTIMATORS_OF_VERL.items()
        if flags
    },
    beta=0,
    flag="use_kl_in_reward=true, use_kl_loss=false; the estimator stays k3",
    since="skyrl_train 0.1.0",
    remark="The default GRPO charges the whole answer and divides by the group's spread.",
    remedy='trainer.algorithm.kl_estimator_type="k1" with use_kl_in_reward',
    cure="k1",
    threads=("NovaSky-AI/SkyRL#805 open", "NovaSky-AI/SkyRL#1262 open"),
)
def skyrl_reward(
    logp: Tensor, ref_logp: Tensor, mask: Tensor, *, kind: str, **estimator: str
) -> Tensor:
    """An estimator of the KL through one of the advantage; the division by a spread left out."""
    return charged(verl_kinds(logp - ref_logp, kind), mask, **estimator)


RPG = tuple(f"rpg_{kl}" for kl in ("fkl", "rkl", "ufkl", "urkl", "js", "ujs"))


@loss(
    "RPG complex-reasoning/RPG verl/trainer/ppo/core_algos.py ec8e30b 2026-06-14",
    _named(*RPG),
    beta=0,
    flag="kl_loss_type",
    no_default=True,
    samples_of_reference=RPG,
)
def rpg(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """The losses of Regularised Policy Gradient for samples of the reference, clamped at 10;
    ``rpg_js`` and ``rpg_ujs`` are meant to be one formula and differ in a sign."""
    del old_logp
    log_w = logp - ref_logp
    if kind == "rpg_fkl":
        return -log_w
    w = log_w.exp()
    values = {
        "rpg_rkl": w * log_w,
        "rpg_ufkl": torch.expm1(log_w) - log_w,
        "rpg_urkl": w * (log_w - 1) + 1,
        "rpg_js": 0.5 * (w * log_w + log_w),
        "rpg_ujs": 0.5 * (w * log_w - log_w),
    }
    return values[kind].clamp(-10, 10)
