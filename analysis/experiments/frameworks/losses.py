r"""The KL terms of the frameworks, one function each, as functions of log-probs (nats).

Written from reading their public sources; :data:`analysis.experiments.frameworks.audit.OPTIONS`
names file, snapshot and date of each. Every function takes ``logp`` (with gradient), ``ref_logp``
and ``old_logp`` (without) of the same shape [...] and returns the per-token term [...] that is
multiplied with beta and minimised. Aggregation over tokens is not part of it. Their clamps are
kept: they are what this chapter is about.
"""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.kl.estimators import k1, k2, k3
from analysis.kl.surrogates import straight_through


def trl_grpo(
    logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, bias_correction: bool, level: str = "token"
) -> Tensor:
    """k3, unclamped; times the live ratio if ``use_bias_correction_kl``.

    At level ``sequence`` the ratio is the geometric mean over the last axis, the same for all its
    tokens. Liger's fused GRPO loss computes the same.
    """
    value = k3(logp, ref_logp)
    if not bias_correction:
        return value
    log_ratio = logp - old_logp
    if level == "sequence":
        log_ratio = log_ratio.mean(-1, keepdim=True)
    return value * log_ratio.exp()


def verl(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """``kl``, ``abs``, ``mse`` or ``low_var_kl``; with ``+``, that value and the gradient of k2.

    ``low_var_kl`` clamps the log-ratio at 20 and its value at 10.
    """
    del old_logp
    ref_log_ratio = logp - ref_logp
    values = {
        "kl": lambda: ref_log_ratio,
        "abs": ref_log_ratio.abs,
        "mse": lambda: k2(logp, ref_logp),
        "low_var_kl": lambda: _k3_of(ref_log_ratio.clamp(-20, 20)).clamp(-10, 10),
    }
    value = values[kind.removesuffix("+")]()
    return straight_through(value, k2(logp, ref_logp)) if kind.endswith("+") else value


def openrlhf(
    logp: Tensor,
    ref_logp: Tensor,
    old_logp: Tensor,
    *,
    estimator: str,
    unbiased_gradient: bool = False,
) -> Tensor:
    """k1, k2 or k3 clamped at 10 on both sides; k3's log-ratio is bounded before its exponential.

    With ``unbiased_gradient`` that value and the gradient of k2 times the detached ratio, the
    ratio at most 10.
    """
    bounded = (logp - ref_logp).clamp(min=-10)
    values = {"k1": lambda: k1(logp, ref_logp), "k2": lambda: k2(logp, ref_logp)}
    value = values.get(estimator, lambda: _k3_of(bounded))().clamp(-10, 10)
    if not unbiased_gradient:
        return value
    weight = (logp - old_logp).exp().clamp(max=10).detach()
    return straight_through(value, weight * k2(logp, ref_logp))


def nemo_rl(
    logp: Tensor,
    ref_logp: Tensor,
    old_logp: Tensor,
    *,
    kind: str,
    on_policy_approximation: bool = False,
) -> Tensor:
    """k1, k2 or k3 of the log-ratio clamped at 20, times a live weight, clamped at 10.

    The weight is the ratio to the sampler under ``use_on_policy_kl_approximation``; else it is 1
    with the ratio's gradient. Where the log-ratio is clamped the weight is detached.
    """
    ref_log_ratio = logp - ref_logp
    bounded = ref_log_ratio.clamp(-20, 20)
    weight = (logp - (old_logp if on_policy_approximation else logp.detach())).exp()
    weight = torch.where(bounded == ref_log_ratio, weight, weight.detach())
    values = {"k1": lambda: bounded, "k2": lambda: bounded.square() / 2}
    return (weight * values.get(kind, lambda: _k3_of(bounded))()).clamp(-10, 10)


def slime(
    logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str, unbiased: bool = False
) -> Tensor:
    """k1, k2 or k3, times the live ratio if ``--use-unbiased-kl``; ``low_var_kl`` clamps at 10.

    The clamp comes after the ratio.
    """
    estimators = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": k3}
    value = estimators[kind](logp, ref_logp)
    if unbiased:
        value = (logp - old_logp).exp() * value
    return value.clamp(-10, 10) if kind == "low_var_kl" else value


def open_instruct(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, estimator: int) -> Tensor:
    """0: k1, 1: k2, 2: k3, 3: live ratio times k1; the log-ratio clamped at 40."""
    bounded = (logp - ref_logp).clamp(-40, 40)
    values = (
        lambda: bounded,
        lambda: bounded.square() / 2,
        lambda: _k3_of(bounded),
        lambda: (logp - old_logp).exp() * bounded,
    )
    return values[estimator]()


def prime_rl(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """``rl``: squared log-ratio to the sampler; ``ref_kl``: the distillation term.

    ``ref_kl`` is the live ratio times the detached log-ratio to the reference, of tokens whose
    probability fell by at most 0.2 below the sampler's. (The framework adds a thousandth of the
    ``rl`` term to it, left out here.)
    """
    if kind == "rl":
        return (logp - old_logp).square()
    kept = logp.exp() - old_logp.exp() >= -0.2
    return kept * (logp - ref_logp).detach() * (logp - old_logp).exp()


def rpg(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """The losses of Regularised Policy Gradient, in the ratio w to the reference, clamped at 10.

    They are derived for samples of the reference itself. ``rpg_js`` and ``rpg_ujs`` are meant to be
    one formula and differ in a sign.
    """
    del old_logp
    log_w = logp - ref_logp
    w = log_w.exp()
    values = {
        "rpg_fkl": lambda: -log_w,
        "rpg_rkl": lambda: (w * log_w).clamp(-10, 10),
        "rpg_ufkl": lambda: (torch.expm1(log_w) - log_w).clamp(-10, 10),
        "rpg_urkl": lambda: (w * (log_w - 1) + 1).clamp(-10, 10),
        "rpg_js": lambda: (0.5 * (w * log_w + log_w)).clamp(-10, 10),
        "rpg_ujs": lambda: (0.5 * (w * log_w - log_w)).clamp(-10, 10),
    }
    return values[kind]()


def rlhf_book(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """``kl1``, ``kl2``, ``kl3`` with policy and reference in each other's place."""
    del old_logp
    return {"kl1": k1, "kl2": k2, "kl3": k3}[kind](ref_logp, logp)


def _k3_of(ref_log_ratio: Tensor) -> Tensor:
    return k3(ref_log_ratio, torch.zeros_like(ref_log_ratio))
