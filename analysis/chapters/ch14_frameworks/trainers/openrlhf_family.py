"""OpenRLHF, and those whose estimators came from it: slime, miles, ROLL, AReaL."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.chapters.ch14_frameworks.trainers.formulas import charged, to_go, value
from analysis.chapters.ch14_frameworks.trainers.registry import charge, loss
from kl_term.kl.estimators import ESTIMATORS, k1, k2
from kl_term.kl.surrogates import straight_through


@loss(
    "OpenRLHF OpenRLHF/OpenRLHF openrlhf/models/utils.py 0.11.2 2026-11-26",
    {
        "k1": {"estimator": "k1"},
        "k2": {"estimator": "k2"},
        "k3": {"estimator": "k3"},
        "k3, unbiased_gradient": {"estimator": "k3", "unbiased_gradient": True},
    },
    beta=0,
    flag="--algo.kl.use_loss, --algo.kl.estimator",
    remark="It prints advice against k1 as a loss: the default is meant for the reward.",
    remedy="--algo.kl.use_loss --algo.kl.unbiased_gradient --algo.kl.estimator k3",
    cure="k3, unbiased_gradient",
    threads=("OpenRLHF/OpenRLHF#1309 merged", "OpenRLHF/OpenRLHF#777 closed"),
)
def openrlhf(
    logp: Tensor,
    ref_logp: Tensor,
    old_logp: Tensor,
    *,
    estimator: str,
    unbiased_gradient: bool = False,
) -> Tensor:
    """k1, k2 or k3 clamped at 10; k3's log-ratio is bounded before; with ``unbiased_gradient``
    the gradient is that of k2 times the detached ratio, at most 10."""
    ref_log_ratio = logp - ref_logp
    bounded = ref_log_ratio.clamp(min=-10) if estimator == "k3" else ref_log_ratio
    kl = value(estimator, bounded).clamp(-10, 10)
    if not unbiased_gradient:
        return kl
    weight = (logp - old_logp).exp().clamp(max=10).detach()
    return straight_through(kl, weight * k2(logp, ref_logp))


@charge(
    "OpenRLHF OpenRLHF/OpenRLHF openrlhf/trainer/ppo_utils/experience_maker.py 0.11.2 2026-11-26",
    {
        name: {}
        for name in (
            *("gae", "reinforce", "reinforce_baseline"),
            *("rloo", "group_norm", "dr_grpo"),
        )
    },
    beta=0.01,
    flag="--algo.kl.init_coef, --algo.advantage.estimator",
    remark="A group's baseline and spread are taken before the KL. gae's critic is left out.",
)
def openrlhf_reward(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """k1, clamped at 10, to go, after the group's baseline of the rewards."""
    return to_go(k1(logp, ref_logp).clamp(-10, 10), mask)


SLIME = {
    "k1": {"kind": "k1"},
    "k1, use-unbiased-kl": {"kind": "k1", "unbiased": True},
    "k2": {"kind": "k2"},
    "k2, use-unbiased-kl": {"kind": "k2", "unbiased": True},
    "low_var_kl": {"kind": "low_var_kl"},
    "low_var_kl, use-unbiased-kl": {"kind": "low_var_kl", "unbiased": True},
}


PLUS_PLUS = {
    "k1, reinforce_plus_plus": {"pays_for": "to go"},
    "k1, reinforce_plus_plus_baseline": {"pays_for": "own"},
}


@loss(
    "slime THUDM/slime slime/utils/ppo_utils.py 624b824 2026-08-21",
    SLIME,
    beta=0,
    divisor="seq_mean_token_mean",
    flag="--use-kl-loss, --kl-loss-type, --use-unbiased-kl",
    remedy="--kl-loss-type low_var_kl --use-unbiased-kl --calculate-per-token-loss",
    cure="low_var_kl, use-unbiased-kl",
    threads=("THUDM/slime#1004 merged",),
)
def slime(
    logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str, unbiased: bool = False
) -> Tensor:
    """k1, k2 or k3, times the live ratio if ``--use-unbiased-kl``; ``low_var_kl`` then clamps at
    10."""
    clamped = kind == "low_var_kl"
    kl = ESTIMATORS["k3" if clamped else kind](logp, ref_logp)
    if unbiased:
        kl = (logp - old_logp).exp() * kl
    return kl.clamp(-10, 10) if clamped else kl


@charge(
    "slime THUDM/slime slime/utils/ppo_utils.py 624b824 2026-08-21",
    PLUS_PLUS,
    beta=0,
    divisor="seq_mean_token_mean",
    flag="--kl-coef; GRPO ignores it",
    threads=("THUDM/slime#2387 open",),
)
def slime_reward(logp: Tensor, ref_logp: Tensor, mask: Tensor, *, pays_for: str) -> Tensor:
    """k1 to go in REINFORCE++, of its own token in its baseline; before the whitening."""
    return charged(k1(logp, ref_logp), mask, pays_for=pays_for, baseline="nobody")


@loss(
    "miles radixark/miles miles/backends/training_utils/loss_hub/math_utils.py 31f1ca9 2026-08-21",
    SLIME,
    beta=0,
    divisor="seq_mean_token_mean",
    flag="--use-kl-loss, --kl-loss-type, --use-unbiased-kl",
    since="the unbiased flag 2025-12-10",
    remark="A KL that overflows counts as zero, the token with the largest one included.",
    remedy="--kl-loss-type low_var_kl --use-unbiased-kl --calculate-per-token-loss",
    cure="low_var_kl, use-unbiased-kl",
)
def miles(
    logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str, unbiased: bool = False
) -> Tensor:
    """slime's, from a log-ratio within 20 for ``low_var_kl``; what is infinite becomes zero."""
    ref_log_ratio = logp - ref_logp
    if kind == "low_var_kl":
        ref_log_ratio = ref_log_ratio.clamp(-20, 20)
    kl = value("k3" if kind == "low_var_kl" else kind, ref_log_ratio)
    if unbiased:
        kl = (logp - old_logp).exp() * kl
    if kind == "low_var_kl":
        kl = kl.clamp(-10, 10)
    return torch.nan_to_num(kl, nan=0.0, posinf=0.0, neginf=0.0)


@charge(
    "miles radixark/miles miles/backends/training_utils/loss_hub/math_utils.py 31f1ca9 2026-08-21",
    PLUS_PLUS,
    beta=0,
    divisor="seq_mean_token_mean",
    flag="--kl-coef; GRPO ignores it",
    remark="Its return counts the KL of masked tokens too, a tool's for one; slime's does not.",
    threads=("radixark/miles#1383 open",),
)
def miles_reward(logp: Tensor, ref_logp: Tensor, mask: Tensor, *, pays_for: str) -> Tensor:
    """slime's, on answers without masked tokens inside."""
    return charged(k1(logp, ref_logp), mask, pays_for=pays_for, baseline="nobody")


@loss(
    "ROLL alibaba/ROLL roll/utils/functionals.py 8eb27cc 2026-08-19",
    {"k3": {}},
    beta=0,
    divisor="seq_mean_token_mean",
    flag="use_kl_loss; kl_penalty is not read there",
    since="0.1.0",
    remark="The loss is k3 whatever kl_penalty says; kl_penalty's full sums over time.",
    remedy='kl_penalty="mse" in pipeline/rlvr/actor_worker.py:56, loss_agg_mode: token-mean',
)
def roll(logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
    """k3, its value clamped at 10."""
    del old_logp
    return value("k3", logp - ref_logp).clamp(-10, 10)


@charge(
    "ROLL alibaba/ROLL roll/utils/functionals.py 8eb27cc 2026-08-19",
    {"kl": {"kind": "k1"}, "mse": {"kind": "k2"}},
    beta=0,
    divisor="seq_mean_token_mean",
    flag="add_token_level_kl, kl_penalty",
    since="0.1.0",
    remark="The critic of the default estimator is left out: gamma and lambda are 1.",
)
def roll_reward(logp: Tensor, ref_logp: Tensor, mask: Tensor, *, kind: str) -> Tensor:
    """The chosen value, to go."""
    return to_go(ESTIMATORS[kind](logp, ref_logp), mask)


@charge(
    "AReaL inclusionAI/AReaL areal/trainer/ppo/actor.py 4aef98d 2026-05-21",
    {"k1, no reference": {"reference": False}, "k1": {}},
    beta=0.1,
    flag="actor.kl_ctl, ref",
    since="0.5.0",
    remark="No reference is configured by default; nearly every example sets kl_ctl to 0.",
    remedy="ref: a model, or actor.kl_ctl: 0.0 where there is none",
    cure="k1",
    threads=("areal-project/AReaL#315 closed",),
)
def areal(logp: Tensor, ref_logp: Tensor, mask: Tensor, *, reference: bool = True) -> Tensor:
    """k1, clamped at 10, to go; without a reference its log-prob is zero for every token."""
    return to_go((logp - ref_logp if reference else logp).clamp(-10, 10), mask)
