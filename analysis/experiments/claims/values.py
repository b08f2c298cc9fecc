"""Claims about k1, k2 and k3 as values: bias, variance, the control variate."""

from __future__ import annotations

import torch

from analysis.experiments.chapters.gradients import drifted_logits, random_policies
from analysis.experiments.chapters.language_model import deviations
from analysis.experiments.chapters.numerics import naive_k3
from analysis.experiments.claims import Finding, decides, settle
from analysis.experiments.language_models import tail
from analysis.kl.divergences import chi_square, forward_kl, reverse_kl
from analysis.kl.enumeration import exact_kl
from analysis.kl.estimators import k3
from analysis.kl.gaussians import moments
from analysis.kl.variance import (
    estimator_means,
    estimator_variances,
    jeffreys_divergence,
)

EXACT = 1e-10
#: Pairs far from each other and from symmetric; and the same references nearby.
FAR = random_policies(200, 16, spread=1.5, seed=101)
NEAR = FAR._replace(
    logits=drifted_logits(FAR.ref_logits, torch.tensor([0.1], dtype=torch.float64), seed=102)[0]
)
STALE = drifted_logits(FAR.logits, torch.tensor([0.5], dtype=torch.float64), seed=103)[0]


def _largest(values: torch.Tensor) -> float:
    return values.abs().max().item()


def _forbid_first_token(logits: torch.Tensor) -> torch.Tensor:
    return logits.index_fill(-1, torch.tensor([0]), -torch.inf)


@decides("S0-2")
def k3_is_unbiased_and_positive() -> Finding:
    """Mean of k3 by enumeration on-policy, stale, and without support; its sign in floats."""
    kl = exact_kl(*FAR, direction="reverse")
    on_policy = _largest(estimator_means(*FAR)["k3"] - kl)
    stale = (estimator_means(*FAR, STALE)["k3"] - kl).abs().median().item()
    cut = _forbid_first_token(FAR.logits)
    uncovered = FAR.ref_logits.softmax(-1)[:, 0]
    missing = estimator_means(cut, FAR.ref_logits)["k3"] - reverse_kl(cut, FAR.ref_logits)
    smallest = k3(FAR.logits.log_softmax(-1), FAR.ref_logits.log_softmax(-1)).min().item()
    near = torch.tensor(0.01).to(torch.bfloat16)
    naive = naive_k3(torch.zeros_like(near), near).item()
    support = _largest(missing + uncovered)
    unbiased, positive = on_policy < EXACT, smallest >= 0
    return Finding(
        settle(
            always=unbiased and positive and stale < EXACT and _largest(missing) < EXACT,
            sometimes=unbiased and positive and support < EXACT,
        ),
        {
            "bias_on_policy": on_policy,
            "bias_stale": stale,
            "bias_without_support": missing.median().item(),
            "naive_bfloat16": naive,
        },
    )


@decides("S0-3")
def k3_equals_the_divergence() -> Finding:
    """Deviation of single samples of k3 from the KL, and of their mean."""
    kl = reverse_kl(*FAR)
    mean_error = _largest(estimator_means(*FAR)["k3"] - kl)
    spread = (estimator_variances(*FAR)["k3"].sqrt() / kl).median().item()
    return Finding(
        settle(always=spread < EXACT, sometimes=False),
        {"relative_std": spread, "mean_error": mean_error},
    )


@decides("S1-7")
def k1_is_unbiased_with_high_variance() -> Finding:
    """Mean and variance of k1 against k3's, near and far from the reference."""
    bias = _largest(estimator_means(*FAR)["k1"] - reverse_kl(*FAR))
    near, far = estimator_variances(*NEAR), estimator_variances(*FAR)
    higher_near = (near["k1"] > near["k3"]).double().mean().item()
    higher_far = (far["k1"] > far["k3"]).double().mean().item()
    unbiased = bias < EXACT
    return Finding(
        settle(
            always=unbiased and higher_near == higher_far == 1,
            sometimes=unbiased and max(higher_near, higher_far) > 0,
        ),
        {"bias": bias, "noisier_near": higher_near, "noisier_far": higher_far},
    )


@decides("S1-8")
def k2_is_biased_with_low_variance() -> Finding:
    """Bias and standard deviation of k2 in units of the KL, near and far."""
    kl = reverse_kl(*FAR)
    bias = (estimator_means(*FAR)["k2"] / kl - 1).abs()
    near, far = estimator_variances(*NEAR), estimator_variances(*FAR)
    lower_near = (near["k2"] < near["k1"]).double().mean().item()
    lower_far = (far["k2"] < far["k1"]).double().mean().item()
    biased = bias.min().item() > EXACT
    return Finding(
        settle(
            always=biased and lower_near == lower_far == 1,
            sometimes=biased and max(lower_near, lower_far) > 0,
        ),
        {
            "bias": bias.median().item(),
            "quieter_near": lower_near,
            "quieter_far": lower_far,
        },
    )


@decides("S1-9")
def the_printed_chain_of_means() -> Finding:
    """E[r] and E[r - 1] under the policy."""
    policy, reference = FAR.logits.softmax(-1), FAR.ref_logits.softmax(-1)
    ratio = (policy * (reference / policy)).sum(-1)
    less_one = (policy * (reference / policy - 1)).sum(-1)
    chain = _largest(less_one - 1) < EXACT
    return Finding(
        settle(always=chain, sometimes=False),
        {"mean_r": ratio.mean().item(), "mean_r_less_one": _largest(less_one)},
    )


@decides("S1-10")
def positivity_lowers_the_variance() -> Finding:
    """Whether k3, never negative, has the lower variance; and the identity that decides it."""
    far, gaussian = estimator_variances(*FAR), moments(0.1, 0.2, 0.0, 1.0)
    noisier = (far["k3"] > far["k1"]).double().mean().item()
    gap = far["k3"] - far["k1"]
    identity = chi_square(*FAR) - 2 * (reverse_kl(*FAR) + forward_kl(*FAR))
    identity_error = (gap / identity - 1).abs().max().item()
    implied = noisier == 0 and gaussian["k3"].var < gaussian["k1"].var
    return Finding(
        settle(always=implied, sometimes=False),
        {"noisier_far": noisier, "identity_error": identity_error},
    )


@decides("S3-9")
def k3_is_unbiased_with_low_variance() -> Finding:
    """The rule chi-square < 2 J against the variances: near, far, and on a language model."""
    unbiased = _largest(estimator_means(*FAR)["k3"] - reverse_kl(*FAR)) < EXACT
    near, far = estimator_variances(*NEAR), estimator_variances(*FAR)
    rule = chi_square(*FAR) < 2 * jeffreys_divergence(*FAR)
    rule_right = ((far["k3"] < far["k1"]) == rule).double().mean().item()
    wins_near = (near["k3"] < near["k1"]).double().mean().item()
    wins_far = (far["k3"] < far["k1"]).double().mean().item()
    on_text = deviations(tail.recorded()["none"].tail)
    return Finding(
        settle(
            always=unbiased and wins_near == wins_far == 1 and on_text["k3"] < on_text["k1"],
            sometimes=unbiased and rule_right == 1 and wins_near > 0,
        ),
        {
            "wins_near": wins_near,
            "wins_far": wins_far,
            "rule_right": rule_right,
            "language_k1_deviation": on_text["k1"],
            "language_k3_deviation": on_text["k3"],
        },
    )


@decides("S3-10")
def the_control_variate() -> Finding:
    """Mean of r - 1, its covariance with log r, and whether adding it lowers the variance."""
    policy, reference = FAR.logits.softmax(-1), FAR.ref_logits.softmax(-1)
    ratio = reference / policy
    mean = (policy * (ratio - 1)).sum(-1)
    mean_log = (policy * ratio.log()).sum(-1)
    covariance = (policy * (ratio - 1) * (ratio.log() - mean_log[:, None])).sum(-1)
    identity_error = _largest(covariance - reverse_kl(*FAR) - forward_kl(*FAR))
    far = estimator_variances(*FAR)
    reduces = (far["k3"] < far["k1"]).double().mean().item()
    zero_mean, negative = _largest(mean) < EXACT, bool((covariance < 0).all())
    return Finding(
        settle(always=zero_mean and negative and reduces == 1, sometimes=zero_mean and negative),
        {
            "smallest_covariance": covariance.min().item(),
            "identity_error": identity_error,
            "reduces_far": reduces,
        },
    )
