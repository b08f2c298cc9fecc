"""Chapter 1's tables against scipy, brute force, and the limits they must reach."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from analysis.experiments.chapters import estimator_values as study
from analysis.experiments.chapters.gaussian_pairs import (
    LIU_APPENDIX_D,
    SCHULMAN_FAR,
    SCHULMAN_NEAR,
    GaussianPair,
    draw,
    log_probs,
    normal_nodes,
)
from analysis.kl.divergences import reverse_kl

V = 40


@pytest.fixture(scope="module")
def reference() -> torch.Tensor:
    return study.zipf_logits(V, 1.2)


@pytest.fixture(scope="module")
def direction() -> torch.Tensor:
    return draw((V,), seed=3)


def test_log_probs_are_those_of_scipy():
    pair = GaussianPair(0.4, 1.7, -0.8, 0.6)
    z = torch.linspace(-3, 3, 31, dtype=torch.float64)
    logp, ref_logp = log_probs(pair, z)
    x = 0.4 + 1.7 * z.numpy()
    assert np.abs(logp.numpy() - stats.norm(0.4, 1.7).logpdf(x)).max() < 1e-12
    assert np.abs(ref_logp.numpy() - stats.norm(-0.8, 0.6).logpdf(x)).max() < 1e-12


def test_quadrature_nodes_have_the_moments_of_a_standard_normal():
    z, weights = normal_nodes()
    for power, moment in ((0, 1), (1, 0), (2, 1), (4, 3), (6, 15)):
        assert (weights * z**power).sum().item() == pytest.approx(moment, abs=1e-9)


@pytest.mark.parametrize("pair", [SCHULMAN_NEAR, SCHULMAN_FAR])
def test_schulman_table_agrees_with_print_and_its_intervals_with_the_closed_form(pair):
    table = study.schulman_table(pair, sample_size=400_000, seed=5)
    assert (table.exact_std - table.printed_std).abs().max() < 0.006
    assert (table.exact_bias - table.printed_bias).abs().max() < 0.001
    for exact, low, high in (
        (table.exact_std, table.std_low, table.std_high),
        (table.exact_bias, table.bias_low, table.bias_high),
    ):
        width = high - low
        assert ((exact - (low + high) / 2).abs() < 2 * width).all()  # four standard errors
        assert (width > 0).all()


def test_the_joint_table_keeps_every_number_in_its_place():
    table = study.schulman_table(SCHULMAN_FAR, sample_size=1000, seed=5)
    joint = study.against_print({"far": table}).set_index(["quantity", "estimator"])
    assert len(joint) == 6
    for name in ("k1", "k2", "k3"):
        assert joint.exact["std", name] == table.exact_std[name]
        assert joint.exact["bias", name] == table.exact_bias[name]
        assert joint.printed["std", name] == table.printed_std[name]
        assert joint.low["bias", name] == table.bias_low[name]
        assert joint.high["std", name] == table.std_high[name]


def test_intervals_of_the_sample_cover_as_often_as_they_say():
    covered = []
    for seed in range(200):
        row = study.sampled_moments(SCHULMAN_FAR, sample_size=2000, seed=seed)["k1"]
        covered.append(
            (row["std_low"] < 2 < row["std_high"], row["bias_low"] < 0 < row["bias_high"])
        )
    share = np.mean(covered, axis=0)
    assert (share > 0.9).all() and (share < 0.99).all()


def test_survival_and_quantiles_of_a_loaded_die():
    values = torch.tensor([3.0, -1.0, 2.0])
    weights = torch.tensor([0.2, 0.5, 0.3])
    thresholds = torch.tensor([-2.0, -1.0, 0.0, 2.0, 2.5, 3.0])
    exceed = study.survival(values, weights, thresholds).tolist()
    assert exceed == pytest.approx([1.0, 0.5, 0.5, 0.2, 0.2, 0.0])
    assert [study.quantile(values, weights, level) for level in (0.4, 0.6, 0.9, 1.0)] == [
        -1,
        2,
        3,
        3,
    ]


def test_gaussian_tail_of_k1_is_the_normal_tail():
    estimates, weights = study.gaussian_estimates(SCHULMAN_FAR)
    thresholds = torch.tensor([1.0, 2.0, 12.0], dtype=torch.float64)
    curve = study.tail_curves(estimates, weights, SCHULMAN_FAR.kl, thresholds)
    # k1 = 1/2 - z, in units of KL = 1/2
    expected = stats.norm.sf(thresholds.numpy() / 2 - 0.5)
    assert np.abs(curve["k1"].to_numpy() - expected).max() < 3e-4
    assert curve["k3"].iloc[-1] > 10 * curve["k1"].iloc[-1]


def test_only_k1_is_ever_negative(reference, direction):
    policy = study.drifted(reference, direction, [0.7])[0]
    estimates, weights = study.softmax_estimates(policy, reference)
    table = study.quantile_table(estimates, weights, 1.0, [0.5])
    below = policy.log_softmax(-1) < reference.log_softmax(-1)
    assert table.negative["k1"] == pytest.approx(policy.softmax(-1)[below].sum().item())
    assert table.negative["k2"] == table.negative["k3"] == 0.0


def test_drift_table_starts_near_the_reference_and_k2_alone_is_biased(reference, direction):
    steps = torch.tensor([0.01, 1.0], dtype=torch.float64)
    table = study.drift_table(reference, direction, steps).set_index(["estimator", "step"])
    for name in ("k1", "k3", "optimal"):
        assert abs(table.bias[name, 1.0]) < 1e-12
    assert abs(table.bias["k2", 1.0]) > 0.01
    assert abs(table.bias["k2", 0.01]) < 0.01
    kl = table.kl["k1", 0.01]
    assert table["std"]["k1", 0.01] == pytest.approx(math.sqrt(2 / kl), rel=0.02)
    assert table["std"]["optimal", 1.0] <= min(table["std"]["k1", 1.0], table["std"]["k3", 1.0])


def test_crossing_is_where_the_two_standard_deviations_meet(reference, direction):
    crossing = study.crossing_kl(reference, direction, farthest=4.0)
    steps = torch.linspace(0.05, 4, 400, dtype=torch.float64)
    table = study.drift_table(reference, direction, steps)
    wide = table.pivot(index="kl", columns="estimator", values="std")
    assert ((wide.k3 < wide.k1) == (wide.index < crossing)).all()


def test_a_path_without_a_crossing_is_refused(reference, direction):
    with pytest.raises(ValueError, match="farthest"):
        study.crossing_kl(reference, direction, farthest=0.05)


def test_stale_samples_bias_k3_in_both_directions_and_the_ratio_repairs_it(reference, direction):
    policy = study.drifted(reference, direction, [1.0])[0]
    update = draw((V,), seed=8)
    steps = torch.tensor([0.0, 0.05], dtype=torch.float64)
    exact = reverse_kl(policy, reference).item()
    errors = []
    for sign in (1, -1):
        table = study.stale_table(policy, reference, sign * update, steps)
        assert table.k3[0] == pytest.approx(exact, rel=1e-12)
        assert np.abs(table.weighted - exact).max() < 1e-12
        errors.append(table.k3[1] - exact)
    assert errors[0] * errors[1] < 0


def test_binary_bias_of_k2_by_hand():
    table = study.binary_bias(0.2, torch.tensor([0.5, 0.05], dtype=torch.float64))
    for probability, bias in zip(table.probability, table.bias, strict=True):
        l1, l2 = math.log(probability / 0.2), math.log((1 - probability) / 0.8)
        kl = probability * l1 + (1 - probability) * l2
        k2 = (probability * l1**2 + (1 - probability) * l2**2) / 2
        assert bias == pytest.approx(k2 / kl - 1, rel=1e-10)
    assert table.bias[0] > 0 > table.bias[1]


def test_kl_of_the_printed_pairs():
    assert SCHULMAN_NEAR.kl == pytest.approx(0.005)
    assert LIU_APPENDIX_D.kl == pytest.approx(1.1344, abs=5e-5)
