"""Claims about the printed counterexample to k3, and about k3_clip and k4."""

from __future__ import annotations

import math
from functools import cache

import pandas as pd
import torch

from analysis.experiments.chapters.counterexample import PRINTED, exact_moments, printed_script_over
from analysis.experiments.chapters.gaussian_pairs import LIU_APPENDIX_D
from analysis.experiments.claims import Finding, decides, settle
from analysis.experiments.claims.values import FAR
from analysis.kl.estimators import k1, k3, k4
from analysis.kl.gaussians import k3_variance_is_finite
from analysis.kl.surrogates import gradient_coefficient
from analysis.kl.variance import estimator_variances

SEEDS = 1000


@cache
def _runs() -> pd.DataFrame:
    """The printed script under as many seeds; its global generator is put back afterwards."""
    state = torch.get_rng_state()
    try:
        return printed_script_over(range(SEEDS))
    finally:
        torch.set_rng_state(state)


def _place(name: str, column: str) -> float:
    """Share of seeds whose number lies below the printed one."""
    return float((_runs()[name][column] < PRINTED.loc[name, column]).mean())


@decides("S4-34")
def printed_bias_and_std_of_k3() -> Finding:
    """Exact bias and variance of k3 for the printed Gaussians; the print's place among seeds."""
    exact = exact_moments(LIU_APPENDIX_D).loc["k3"]
    finite = k3_variance_is_finite(LIU_APPENDIX_D.q_std, LIU_APPENDIX_D.p_std)
    agrees = abs(exact["bias"] - PRINTED.loc["k3", "bias"]) < 0.05 and finite
    biases = _runs()["k3"]["bias"]
    return Finding(
        settle(always=agrees, sometimes=False),
        {
            "exact_bias": exact["bias"],
            "exact_std": exact["std"],
            "median_bias": biases.median(),
            "share_below_truth": float((biases < 0).mean()),
            "place_of_print": _place("k3", "bias"),
        },
    )


@decides("S4-35")
def printed_bias_and_std_of_k1_and_k2() -> Finding:
    """The printed columns against the exact moments and against their spread over seeds."""
    exact = exact_moments(LIU_APPENDIX_D)
    places = {
        f"place_{name}_{column}": _place(name, column)
        for name in ("k1", "k2")
        for column in ("bias", "std")
    }
    typical = all(0.025 < place < 0.975 for place in places.values())
    printed_are_exact = all(
        abs(exact.loc[name, column] - PRINTED.loc[name, column]) < 5e-5
        for name in ("k1", "k2")
        for column in ("bias", "std")
    )
    return Finding(
        settle(always=printed_are_exact, sometimes=typical),
        {
            "k1_std": exact.loc["k1", "std"],
            "k2_bias": exact.loc["k2", "bias"],
            "k2_std": exact.loc["k2", "std"],
            **places,
        },
    )


@decides("S4-36")
def k3_clip_tames_the_variance() -> Finding:
    """Exact moments of k3_clip by quadrature, and the sign of its gradient above the cap."""
    moments = exact_moments(LIU_APPENDIX_D)
    exact = moments.loc["k3_clip"]
    above_the_cap = torch.tensor(-3.0), torch.tensor(0.0)
    coefficient = gradient_coefficient(*above_the_cap, estimator="k3_clip").item()
    tames = math.isfinite(exact["std"]) and exact["std"] < moments.loc["k1", "std"]
    unharmed = abs(exact["bias"]) < 1e-6 and coefficient < 0
    return Finding(
        settle(always=tames and unharmed, sometimes=tames),
        {
            "bias": exact["bias"],
            "std": exact["std"],
            "coefficient_above_cap": coefficient,
            "place_of_printed_bias": _place("k3_clip", "bias"),
        },
    )


@decides("S4-37")
def k4_is_k3() -> Finding:
    """Largest difference of k4 and k3 over a grid of log-ratios, in both float types."""
    differences = []
    for dtype in (torch.float32, torch.float64):
        log_ratio = torch.linspace(-12, 12, 100_001, dtype=dtype)
        zeros = torch.zeros_like(log_ratio)
        differences.append((k4(log_ratio, zeros) - k3(log_ratio, zeros)).abs().max().item())
        violations = (k3(log_ratio, zeros) > k1(log_ratio, zeros)) & (log_ratio >= 0)
        differences.append(violations.double().sum().item())
    largest = max(differences)
    return Finding(settle(always=largest == 0, sometimes=False), {"largest_difference": largest})


@decides("S4-38")
def k3_is_not_always_the_quietest() -> Finding:
    """How often the variance of k3 exceeds that of k1, and of k2, over far pairs."""
    variances = estimator_variances(*FAR)
    over_k1 = (variances["k3"] > variances["k1"]).double().mean().item()
    over_k2 = (variances["k3"] > variances["k2"]).double().mean().item()
    return Finding(
        settle(always=over_k1 > 0 and over_k2 > 0, sometimes=False),
        {"share_over_k1": over_k1, "share_over_k2": over_k2},
    )
