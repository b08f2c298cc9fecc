"""Trainers with a loss of their own: NeMo-RL, open-instruct, prime-rl, the RLHF book's, Tunix and
MaxText, OAT, the Tinker cookbook."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.chapters.ch14_frameworks.trainers.formulas import own_token, to_go, value
from analysis.chapters.ch14_frameworks.trainers.registry import charge, loss
from kl_term.kl.estimators import ESTIMATORS, k1, k2, k3

APPROXIMATION = "use_on_policy_kl_approximation"


@loss(
    "NeMo-RL NVIDIA-NeMo/RL nemo_rl/algorithms/utils.py 7ea279a 2026-08-22",
    {
        "k3": {"kind": "k3"},
        f"k3, {APPROXIMATION}": {"kind": "k3", "on_policy_approximation": True},
        "k1": {"kind": "k1"},
        "k2": {"kind": "k2"},
        "k3, to 0.6.0": {"kind": "k3", "live": False},
        f"k3, {APPROXIMATION}, to 0.6.0": {
            "kind": "k3",
            "on_policy_approximation": True,
            "live": False,
        },
    },
    beta=0.01,
    flag="loss_fn.reference_policy_kl_type",
    since="0.7.0; to 0.6.0 the weight was detached",
    threads=("NVIDIA-NeMo/RL#2506 merged", "NVIDIA-NeMo/RL#3978 merged"),
)
def nemo_rl(
    logp: Tensor,
    ref_logp: Tensor,
    old_logp: Tensor,
    *,
    kind: str,
    on_policy_approximation: bool = False,
    live: bool = True,
) -> Tensor:
    """k1, k2 or k3 of the log-ratio clamped at 20, times a live weight, clamped at 10.

    The weight is the ratio to the sampler under ``use_on_policy_kl_approximation``; else it is 1
    with the ratio's gradient. Where the log-ratio is clamped the weight is detached. Up to 0.6.0
    (``live=False``) it was detached everywhere: no score term.
    """
    ref_log_ratio = logp - ref_logp
    bounded = ref_log_ratio.clamp(-20, 20)
    weight = (logp - (old_logp if on_policy_approximation else logp.detach())).exp()
    detached = weight.detach()
    weight = torch.where(bounded == ref_log_ratio, weight, detached) if live else detached
    return (weight * value(kind, bounded)).clamp(-10, 10)


@charge(
    "NeMo-RL NVIDIA-NeMo/RL nemo_rl/algorithms/advantage_estimator.py 7ea279a 2026-08-22",
    {"k3, REINFORCE++": {"kind": "k3"}, "k1, REINFORCE++": {"kind": "k1"}},
    beta=0,
    flag="loss_fn.use_kl_in_reward; the estimator stays k3",
    remark="The batch is whitened after it.",
    remedy='loss_fn.reference_policy_kl_type: "k1" with use_kl_in_reward',
    cure="k1, REINFORCE++",
)
def nemo_rl_reward(logp: Tensor, ref_logp: Tensor, mask: Tensor, *, kind: str) -> Tensor:
    """An estimator, clamped as in the loss, as the price of its own token."""
    return own_token(value(kind, (logp - ref_logp).clamp(-20, 20)).clamp(-10, 10), mask)


@loss(
    "open-instruct allenai/open-instruct open_instruct/model_utils.py e6c3044 2026-08-20",
    {"2": {"estimator": 2}, "0": {"estimator": 0}, "1": {"estimator": 1}, "3": {"estimator": 3}},
    beta=0.05,
    flag="--kl_estimator",
    remedy="--kl_estimator 3",
    cure="3",
    threads=(
        "allenai/open-instruct#534 open",
        "allenai/open-instruct#530 closed",
        "allenai/open-instruct#535 merged",
    ),
)
def open_instruct(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, estimator: int) -> Tensor:
    """0: k1, 1: k2, 2: k3, 3: live ratio times k1; the log-ratio clamped at 40."""
    bounded = (logp - ref_logp).clamp(-40, 40)
    if estimator == 3:
        return (logp - old_logp).exp() * bounded
    return value(("k1", "k2", "k3")[estimator], bounded)


@loss(
    "prime-rl PrimeIntellect-ai/prime-rl src/prime_rl/trainer/rl/loss.py 559b447 2026-08-21",
    {"rl": {"kind": "rl"}, "ref_kl": {"kind": "ref_kl"}},
    beta=0.001,
    divisor="seq_mean_token_sum",
    flag="the loss's type",
    samples_of_reference=("rl",),
)
def prime_rl(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """``rl``: squared log-ratio to the sampler; ``ref_kl``: the distillation term, live ratio
    times the detached log-ratio to the reference, of tokens whose probability fell by at most
    0.2. (A thousandth of ``rl`` that the framework adds is left out.)"""
    if kind == "rl":
        return (logp - old_logp).square()
    kept = logp.exp() - old_logp.exp() >= -0.2
    return kept * (logp - ref_logp).detach() * (logp - old_logp).exp()


@loss(
    "rlhf-book natolambert/rlhf-book code/policy_gradients/loss.py a66b0bf 2026-08-21",
    {"kl3": {"kind": "kl3"}, "kl1": {"kind": "kl1"}, "kl2": {"kind": "kl2"}},
    beta=0,
    flag="kl_estimator",
    remark="Policy and reference are in each other's place.",
    remedy="kl_estimator: kl2, for which the exchange does not matter",
    cure="kl2",
    threads=("natolambert/rlhf-book#489 open",),
)
def rlhf_book(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """``kl1``, ``kl2``, ``kl3`` with policy and reference in each other's place."""
    del old_logp
    return {"kl1": k1, "kl2": k2, "kl3": k3}[kind](ref_logp, logp)


TUNIX = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}


@loss(
    "Tunix google/tunix tunix/rl/common.py c7d8950 2026-08-21",
    {kind: {"kind": kind} for kind in TUNIX},
    beta=0.04,
    divisor="seq_mean_token_mean",
    flag="GRPOConfig.kl_loss_mode",
    since="0.1.7; to 0.1.6 the loss was k3",
    remedy='kl_loss_mode="mse_kl", loss_agg_mode="token-mean"',
    cure="mse_kl",
)
def tunix(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """k1, k2 or k3, without a clamp unless ``kl_clamp_value`` is set."""
    del old_logp
    return ESTIMATORS[TUNIX[kind]](logp, ref_logp)


@charge(
    "Tunix google/tunix tunix/rl/ppo/ppo_learner.py c7d8950 2026-08-21",
    {"low_var_kl, PPO": {"kind": "low_var_kl"}, "kl, PPO": {"kind": "kl"}},
    beta=0.04,
    divisor="seq_mean_token_mean",
    flag="PPOConfig.kl_method",
    remark="The critic is left out; GAE's lambda is 0.95.",
    remedy='kl_method="kl"',
    cure="kl, PPO",
)
def tunix_ppo(logp: Tensor, ref_logp: Tensor, mask: Tensor, *, kind: str) -> Tensor:
    """An estimator, to go and discounted."""
    return to_go(ESTIMATORS[TUNIX[kind]](logp, ref_logp), mask, discount=0.95)


@loss(
    "MaxText AI-Hypercomputer/maxtext src/maxtext/trainers/post_train/rl/train_rl.py e591f30 "
    "2026-08-22",
    {"through Tunix": {"kind": "k1"}, "experimental/rl": {"kind": "k3"}},
    beta=0.08,
    divisor="seq_mean_token_mean",
    flag="rl.grpo_beta; Tunix's kl_loss_mode is not passed on",
    remark="Which KL it is, the installed Tunix decides: k3 to 0.1.6, k1 from 0.1.7.",
    remedy='GrpoConfig(..., kl_loss_mode="mse_kl") in train_rl.py, rl.loss_agg_mode: token-mean',
)
def maxtext(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """Tunix's default, or the older trainer's k3."""
    del old_logp
    return ESTIMATORS[kind](logp, ref_logp)


@loss(
    "OAT sail-sg/oat oat/algorithms/ppo.py c1a074c 2025-10-31",
    {"beta": {}},
    beta=0.1,
    divisor="seq_mean_token_mean",
    flag="--beta, of all its algorithms",
    remark="--kl_penalty_coef adds a second KL, in the reward.",
    remedy="--beta 0 --kl_penalty_coef 0.1",
)
def oat(logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
    """k3 of the log-ratio clamped at 40."""
    del old_logp
    return value("k3", (logp - ref_logp).clamp(-40, 40))


@charge(
    "OAT sail-sg/oat oat/algorithms/ppo.py c1a074c 2025-10-31",
    {"kl_penalty_coef": {}},
    beta=0,
    divisor="seq_mean_token_mean",
    flag="--kl_penalty_coef",
    since="0.0.6",
    remark="The critic is left out: gamma and lambda are 1.",
)
def oat_reward(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """k1 to go."""
    return to_go(k1(logp, ref_logp), mask)


@charge(
    "tinker-cookbook thinking-machines-lab/tinker-cookbook tinker_cookbook/rl/metrics.py 0.6.1 "
    "2026-11-26",
    {"default": {}, "kl_discount_factor=1": {"discount": 1.0}},
    beta=0,
    divisor="seq_mean_token_sum",
    flag="kl_penalty_coef, kl_discount_factor",
    since="0.1.0",
    remark="The docstring says that avg_kl represents minus the KL; the code has plus.",
)
def tinker(logp: Tensor, ref_logp: Tensor, mask: Tensor, *, discount: float = 0.0) -> Tensor:
    """k1 as the price of its own token, or to go. It is charged less its mean over the batch,
    which is left out here: one number for all tokens, a baseline."""
    return to_go(k1(logp, ref_logp), mask, discount=discount)
