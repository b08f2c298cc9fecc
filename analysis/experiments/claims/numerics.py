"""Claims about one line of code: TRL's per-token KL, what it is and how it behaves in floats."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from analysis.experiments.chapters.numerics import (
    coefficient_slopes,
    naive_k3,
    overflow_threshold,
    relative_errors,
    small_log_ratios,
)
from analysis.experiments.claims import Finding, decides, settle
from analysis.kl.estimators import k2, k3

LOGP = torch.linspace(-9.0, -0.1, 90, dtype=torch.float64)[:, None].expand(90, 90).contiguous()
REF_LOGP = LOGP.T.contiguous()


def _printed(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return torch.exp(ref_logp - logp) - (ref_logp - logp) - 1


@decides("S2-2")
def the_printed_line_is_k3() -> Finding:
    """Value and gradient of the printed line against k3, and against k3 with the sign flipped."""
    leaf = LOGP.clone().requires_grad_(True)
    printed = _printed(leaf, REF_LOGP)
    (gradient,) = torch.autograd.grad(printed.sum(), leaf)
    scale = printed.detach().abs().max()
    value_error = ((printed - k3(LOGP, REF_LOGP)).abs().max() / scale).item()
    by_hand = 1 - torch.exp(REF_LOGP - LOGP)
    gradient_error = ((gradient - by_hand).abs().max() / by_hand.abs().max()).item()
    flipped = ((printed - k3(REF_LOGP, LOGP)).abs().max() / scale).item()
    return Finding(
        settle(always=max(value_error, gradient_error) < 1e-12 < flipped, sometimes=False),
        {"value_error": value_error, "gradient_error": gradient_error, "flipped": flipped},
    )


@decides("S2-3")
def the_printed_line_is_a_second_order_expansion() -> Finding:
    """The printed line against its own second-order expansion, which is k2, at two distances."""
    ref_logp = torch.tensor([0.01, 5.0], dtype=torch.float64)
    logp = torch.zeros_like(ref_logp)
    near, far = (_printed(logp, ref_logp) / k2(logp, ref_logp)).tolist()
    return Finding(
        settle(always=math.isclose(far, 1.0, rel_tol=1e-9), sometimes=False),
        {"ratio_near": near, "ratio_far": far},
    )


@decides("S2-4")
def the_printed_line_is_stabler_and_smoother() -> Finding:
    """Float32 error near the reference, overflow far from it, and growth of the coefficient."""
    small = small_log_ratios()
    naive = relative_errors(naive_k3, torch.float32, small)
    threshold = overflow_threshold(torch.float32)
    slopes = coefficient_slopes(log_ratio=-5.0)
    stable = naive.max().item() < 0.01 and math.isinf(threshold)
    smooth = slopes["k3"] <= slopes["k2"]
    return Finding(
        settle(always=stable and smooth, sometimes=stable or smooth),
        {
            "median_error_naive": naive.median().item(),
            "median_error_expm1": relative_errors(k3, torch.float32, small).median().item(),
            "overflow_at": threshold,
            "slope_k2": slopes["k2"],
            "slope_k3": slopes["k3"],
        },
    )
