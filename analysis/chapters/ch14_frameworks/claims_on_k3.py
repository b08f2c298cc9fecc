"""What chapter 14 decides of k3 as TRL prints it, which is the line of ``naive_k3``."""

from __future__ import annotations

import math

import torch
from torch.func import grad

from analysis.chapters.ch14_frameworks.digits import (
    FORMS,
    overflow_threshold,
    relative_errors,
    small_log_ratios,
)
from analysis.evidence.claims import Finding, claim, judge, largest, median
from analysis.evidence.naive_k3 import naive_k3
from kl_term.kl.estimators import k2, k3
from kl_term.kl.surrogates import gradient_coefficient

LOGP = torch.linspace(-9.0, -0.1, 90, dtype=torch.float64)[:, None].expand(90, 90).contiguous()
REF_LOGP = LOGP.T.contiguous()


@claim("S2-2")
def the_printed_line_is_k3() -> Finding:
    """Value and gradient of the printed line against k3, and against k3 with the sign flipped."""
    printed = naive_k3(LOGP, REF_LOGP)
    gradient = grad(lambda at: naive_k3(at, REF_LOGP).sum())(LOGP)
    by_hand = 1 - torch.exp(REF_LOGP - LOGP)
    figures = {
        "value_error": largest(printed - k3(LOGP, REF_LOGP)) / largest(printed),
        "gradient_error": largest(gradient - by_hand) / largest(by_hand),
        "flipped": largest(printed - k3(REF_LOGP, LOGP)) / largest(printed),
    }
    same = max(figures["value_error"], figures["gradient_error"]) < 1e-12 < figures["flipped"]
    return Finding(judge(always=same, sometimes=False), figures)


@claim("S2-3")
def the_printed_line_is_a_second_order_expansion() -> Finding:
    """The printed line against its own second-order expansion, which is k2, at two distances."""
    ref_logp = torch.tensor([0.01, 5.0], dtype=torch.float64)
    logp = torch.zeros_like(ref_logp)
    near, far = (naive_k3(logp, ref_logp) / k2(logp, ref_logp)).tolist()
    return Finding(
        judge(always=math.isclose(far, 1.0, rel_tol=1e-9), sometimes=False),
        {"ratio_near": near, "ratio_far": far},
    )


@claim("S2-4")
def the_printed_line_is_stabler_and_smoother() -> Finding:
    """Float32 error near the reference, overflow far from it, and growth of the coefficient."""
    naive, widened = (
        relative_errors(FORMS[form], torch.float32, small_log_ratios())
        for form in ("naive", "widened")
    )
    points, slopes = torch.tensor([-5.0 - 1e-5, -5.0 + 1e-5], dtype=torch.float64), {}
    for name in ("k2", "k3"):  # central differences of the coefficient
        low, high = gradient_coefficient(points, torch.zeros_like(points), estimator=name)
        slopes[name] = ((high - low) / 2e-5).item()
    figures = {
        "median_error_naive": median(naive),
        "median_error_expm1": median(widened),
        "overflow_at": overflow_threshold(torch.float32),
        "slope_k2": slopes["k2"],
        "slope_k3": slopes["k3"],
    }
    stable = largest(naive) < 0.01 and math.isinf(figures["overflow_at"])
    smooth = slopes["k3"] <= slopes["k2"]
    return Finding(judge(always=stable and smooth, sometimes=stable or smooth), figures)
