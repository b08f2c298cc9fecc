"""The figures behind the value claims by another route; a wrong sign overturns the verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from analysis.experiments.chapters.counterexample import PRINTED
from analysis.experiments.chapters.numerics import dead_zone_edge, overflow_threshold
from analysis.experiments.claims import counterexample, numerics, values
from analysis.kl import estimators
from analysis.kl.surrogates import ESTIMATORS


def softmax(logits):
    raw = np.exp(logits.numpy())
    return raw / raw.sum(-1, keepdims=True)


@pytest.fixture
def far():
    policy, reference = softmax(values.FAR.logits), softmax(values.FAR.ref_logits)
    return policy, reference, np.log(policy / reference)


def variance(weights, samples):
    mean = (weights * samples).sum(-1, keepdims=True)
    return (weights * (samples - mean) ** 2).sum(-1)


@pytest.fixture
def flipped(monkeypatch):
    """The same decisions with the reference and the policy exchanged inside every estimator."""
    for name, estimator in list(ESTIMATORS.items()):
        monkeypatch.setitem(ESTIMATORS, name, lambda logp, ref_logp, e=estimator: e(ref_logp, logp))


def test_k3_is_unbiased_and_positive(far):
    policy, reference, log_ratio = far
    k3 = reference / policy - 1 + log_ratio
    assert np.abs((policy * k3).sum(-1) - (policy * log_ratio).sum(-1)).max() < 1e-12
    stale = np.abs((softmax(values.STALE) * k3).sum(-1) - (policy * log_ratio).sum(-1))
    figures = values.k3_is_unbiased_and_positive().figures
    assert figures["bias_stale"] == pytest.approx(torch.tensor(stale).median().item(), rel=1e-10)
    assert figures["bias_without_support"] < 0
    assert figures["naive_bfloat16"] == -(2**-8)


def test_flipped_signs_overturn_the_verdicts(flipped):
    assert values.k3_is_unbiased_and_positive().verdict == "fails"
    assert values.k1_is_unbiased_with_high_variance().verdict == "fails"
    assert values.k3_is_unbiased_with_low_variance().verdict == "fails"


def test_k3_equals_the_divergence_only_in_the_mean(far):
    policy, reference, log_ratio = far
    k3 = reference / policy - 1 + log_ratio
    spread = np.sqrt(variance(policy, k3)) / (policy * log_ratio).sum(-1)
    finding = values.k3_equals_the_divergence()
    assert finding.verdict == "fails"
    assert finding.figures["relative_std"] == pytest.approx(
        torch.tensor(spread).median().item(), rel=1e-9
    )


def test_variance_claims(far):
    policy, reference, log_ratio = far
    samples = {
        "k1": log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": reference / policy - 1 + log_ratio,
    }
    of = {name: variance(policy, sample) for name, sample in samples.items()}
    noisier = (of["k3"] > of["k1"]).mean()
    assert 0.2 < noisier < 0.9
    assert values.positivity_lowers_the_variance().figures["noisier_far"] == noisier
    assert values.k3_is_unbiased_with_low_variance().figures["wins_far"] == 1 - noisier
    assert values.k1_is_unbiased_with_high_variance().figures["noisier_far"] == 1 - noisier
    assert (
        values.k2_is_biased_with_low_variance().figures["quieter_far"]
        == (of["k2"] < of["k1"]).mean()
    )
    assert (
        counterexample.k3_is_not_always_the_quietest().figures["share_over_k2"]
        == (of["k3"] > of["k2"]).mean()
    )


def test_the_chain_of_means_and_the_control_variate(far):
    policy, reference, log_ratio = far
    assert (policy * (reference / policy)).sum(-1) == pytest.approx(1.0)
    assert values.the_printed_chain_of_means().verdict == "fails"
    covariance = (policy * (reference / policy - 1) * -log_ratio).sum(-1)
    figures = values.the_control_variate().figures
    assert figures["smallest_covariance"] == pytest.approx(covariance.min(), rel=1e-9)
    assert covariance.min() > 0  # with log r; the tutorial's sign is that of k1 = -log r


def test_printed_numbers_of_k3():
    finding = counterexample.printed_bias_and_std_of_k3()
    assert finding.verdict == "fails"
    assert finding.figures["exact_std"] == math.inf
    assert finding.figures["share_below_truth"] > 0.85
    assert finding.figures["median_bias"] < -0.2
    # The mean exists and is the KL all the same: the integral of r is one.
    q, p = stats.norm(0.1, 0.2), stats.norm(0, 1)
    mean_r, _ = integrate.quad(lambda x: q.pdf(x) * p.pdf(x) / q.pdf(x), -7, 7)
    assert mean_r == pytest.approx(1.0, abs=1e-9)


def mean(function):
    """Mean of a function of the log-ratio under the printed Gaussians, by quadrature."""
    q, p = stats.norm(0.1, 0.2), stats.norm(0, 1)
    value, _ = integrate.quad(
        lambda x: q.pdf(x) * function(q.logpdf(x) - p.logpdf(x)), -2.4, 2.6, limit=400
    )
    return value


def test_printed_numbers_of_k1_and_k2():
    kl = mean(lambda log_ratio: log_ratio)
    k2 = mean(lambda log_ratio: log_ratio**2 / 2)
    k2_std = math.sqrt(mean(lambda log_ratio: (log_ratio**2 / 2 - k2) ** 2))
    finding = counterexample.printed_bias_and_std_of_k1_and_k2()
    assert finding.verdict == "holds if"
    assert finding.figures["k2_bias"] == pytest.approx(k2 / kl - 1, abs=1e-8)
    assert finding.figures["k2_std"] == pytest.approx(k2_std / kl, abs=1e-8)


def test_k3_clip_tames_the_variance_at_a_price():
    kl = mean(lambda log_ratio: log_ratio)
    clipped = mean(lambda log_ratio: min(math.exp(-log_ratio), 10) - 1 + log_ratio)
    finding = counterexample.k3_clip_tames_the_variance()
    assert finding.verdict == "holds if"
    assert finding.figures["bias"] == pytest.approx(clipped / kl - 1, abs=1e-4)
    assert finding.figures["coefficient_above_cap"] == 1.0
    below, above = estimators.k3_clip(torch.zeros(2), torch.tensor([8.99, 9.01]))
    assert below > 0 > above


def test_k4_is_k3(monkeypatch):
    assert counterexample.k4_is_k3().verdict == "holds"
    monkeypatch.setattr(counterexample, "k4", estimators.k1)
    assert counterexample.k4_is_k3().verdict == "fails"


def test_the_printed_columns_are_those_of_the_source():
    assert PRINTED.loc["k3"].tolist() == [-0.4051, 2.4417]
    assert PRINTED.loc["k3_clip"].tolist() == [-0.4676, 0.4370]


def test_the_printed_line_is_k3_and_no_expansion(monkeypatch):
    assert numerics.the_printed_line_is_k3().verdict == "holds"
    expansion = numerics.the_printed_line_is_a_second_order_expansion()
    assert expansion.verdict == "fails"
    assert expansion.figures["ratio_far"] == pytest.approx((math.exp(5) - 6) / 12.5, rel=1e-12)
    monkeypatch.setattr(numerics, "_printed", lambda logp, ref_logp: estimators.k3(ref_logp, logp))
    assert numerics.the_printed_line_is_k3().verdict == "fails"


def test_the_printed_line_in_floats():
    finding = numerics.the_printed_line_is_stabler_and_smoother()
    assert finding.verdict == "fails"
    assert finding.figures["median_error_naive"] > 100 * finding.figures["median_error_expm1"]
    assert finding.figures["overflow_at"] == pytest.approx(128 * math.log(2), abs=1e-3)
    assert finding.figures["slope_k3"] == pytest.approx(math.exp(5), rel=1e-6)


def test_dead_zones_solve_their_equations():
    edge = dead_zone_edge(estimators.k3, value_bound=10.0)
    assert edge - 1 - math.log(edge) == pytest.approx(10.0, abs=1e-9)
    assert math.log(dead_zone_edge(estimators.k2, value_bound=10.0)) == pytest.approx(math.sqrt(20))
    assert overflow_threshold(torch.float16) == pytest.approx(math.log(65504), abs=1e-3)
