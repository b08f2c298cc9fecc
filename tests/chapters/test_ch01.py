"""Chapter 1's tables against scipy, brute force, and the limits they must reach."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from analysis.chapters import ch01_estimators as study
from analysis.chapters.ch01_estimators import SCHULMAN_FAR
from kl_term.kl.surrogates import ESTIMATORS

V = 40


@pytest.fixture(scope="module")
def reference() -> torch.Tensor:
    return study.zipf_logits(V, 1.2)


@pytest.fixture(scope="module")
def direction() -> torch.Tensor:
    return study.normal_draws((V,), seed=3)


def test_log_probs_are_those_of_scipy():
    z = torch.linspace(-3, 3, 31, dtype=torch.float64)
    logp, ref_logp = study.log_probs(study.GaussianPair(0.4, 1.7, -0.8, 0.6), z)
    x = 0.4 + 1.7 * z.numpy()
    assert np.abs(logp.numpy() - stats.norm(0.4, 1.7).logpdf(x)).max() < 1e-12
    assert np.abs(ref_logp.numpy() - stats.norm(-0.8, 0.6).logpdf(x)).max() < 1e-12


def test_quadrature_nodes_have_the_moments_of_a_standard_normal():
    z, weights = study.normal_nodes()
    for power, moment in ((0, 1), (1, 0), (2, 1), (4, 3), (6, 15)):
        assert (weights * z**power).sum().item() == pytest.approx(moment, abs=1e-9)


def test_survival_and_quantiles_of_a_loaded_die():
    die, weights = {"die": torch.tensor([3.0, -1.0, 2.0])}, torch.tensor([0.2, 0.5, 0.3]).double()
    thresholds = torch.tensor([-2.0, -1.0, 0.0, 2.0, 2.5, 3.0])
    exceed = study.tail_curves(die, weights, 1.0, thresholds)["die"]
    assert exceed.to_list() == pytest.approx([1.0, 0.5, 0.5, 0.2, 0.2, 0.0])
    row = study.quantile_table(die, weights, 1.0, (0.4, 0.6, 0.9, 1.0)).loc["die"]
    assert row.to_list() == pytest.approx([-1, 2, 3, 3, 0.5])


def test_gaussian_tail_of_k1_is_the_normal_tail():
    nodes, weights = study.normal_nodes()
    estimates = study.estimates(*study.log_probs(SCHULMAN_FAR, nodes))
    thresholds = torch.tensor([1.0, 2.0, 12.0], dtype=torch.float64)
    curve = study.tail_curves(estimates, weights, SCHULMAN_FAR.kl, thresholds)
    expected = stats.norm.sf(thresholds.numpy() / 2 - 0.5)  # k1 = 1/2 - z, in units of KL = 1/2
    assert np.abs(curve["k1"].to_numpy() - expected).max() < 3e-4
    assert curve["k3"].iloc[-1] > 10 * curve["k1"].iloc[-1]


def test_drift_starts_near_the_reference_and_crosses_where_the_deviations_meet(
    reference, direction
):
    steps = torch.cat([torch.tensor([0.01]).double(), torch.linspace(0.05, 4, 400).double()])
    table = study.drift_table(reference, direction, steps)
    wide = table.pivot(index="kl", columns="estimator", values="std")
    crossing = study.crossing_kl(reference, direction, farthest=4.0)
    assert ((wide.k3 < wide.k1) == (wide.index < crossing)).all()
    assert wide.k1.iloc[0] == pytest.approx(math.sqrt(2 / wide.index[0]), rel=0.02)
    bias = table.pivot(index="kl", columns="estimator", values="bias")
    assert bias.iloc[-1][["k1", "k3"]].abs().max() < 1e-12 < abs(bias.k2.iloc[-1])
    with pytest.raises(ValueError, match="different signs"):
        study.crossing_kl(reference, direction, farthest=0.05)


def test_claims_count_what_numpy_counts():
    """The shares behind the value claims, from log-probs alone."""
    policy, reference = (study.FAR.logits.softmax(-1), study.FAR.ref_logits.softmax(-1))
    p, q = policy.numpy(), reference.numpy()
    samples = {"k1": np.log(p / q), "k2": np.log(p / q) ** 2 / 2, "k3": q / p - 1 + np.log(p / q)}
    mean = {k: (p * s).sum(-1, keepdims=True) for k, s in samples.items()}
    variance = {k: (p * (s - mean[k]) ** 2).sum(-1) for k, s in samples.items()}
    wins = (variance["k3"] < variance["k1"]).mean()
    assert 0.1 < wins < 0.8
    assert study.k3_is_unbiased_with_low_variance().figures["wins_far"] == wins
    quieter = (variance["k2"] < variance["k1"]).mean()
    assert study.k2_is_biased_with_low_variance().figures["quieter_far"] == quieter
    spread = np.median(np.sqrt(variance["k3"]) / mean["k1"][:, 0])
    found = study.k3_equals_the_divergence().figures["relative_std"]
    assert found == pytest.approx(spread, rel=0.02)  # torch's median is the lower one of two


def test_the_chain_of_means_and_the_sign_of_the_control_variate():
    """E[r - 1] is zero, not one; r - 1 rises with log r and falls with k1 = -log r."""
    p, q = study.FAR.logits.softmax(-1).numpy(), study.FAR.ref_logits.softmax(-1).numpy()
    assert (p * (q / p)).sum(-1) == pytest.approx(1.0)
    assert study.the_printed_chain_of_means().verdict == "fails"
    covariance = (p * (q / p - 1) * np.log(q / p)).sum(-1)
    found = study.the_control_variate().figures["smallest_covariance"]
    assert found == pytest.approx(covariance.min(), rel=1e-9) and covariance.min() > 0


def test_exchanged_policies_overturn_the_verdicts(monkeypatch):
    for name, estimator in list(ESTIMATORS.items()):
        monkeypatch.setitem(ESTIMATORS, name, lambda logp, ref_logp, e=estimator: e(ref_logp, logp))
    for decide in (
        study.k3_is_unbiased_and_positive,
        study.k1_is_unbiased_with_high_variance,
        study.k3_is_unbiased_with_low_variance,
    ):
        assert decide().verdict == "fails"
