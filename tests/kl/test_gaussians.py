from __future__ import annotations

import math

import pytest
import torch
from scipy import integrate, stats

from kl_term.kl.gaussians import gaussian_chi_square, gaussian_kl, k3_variance_is_finite, moments

PAIRS = [
    (0.3, 1.4, -0.5, 1.1),
    (0.0, 1.0, 0.1, 1.0),
    (0.0, 1.0, 1.0, 1.0),
    (-1.0, 0.9, 0.2, 1.0),
]


def quadrature(function, q_mean, q_std, p_mean, p_std):
    """E_q[function(log-ratio)] by adaptive quadrature: no closed form shared with the package."""
    q, p = stats.norm(q_mean, q_std), stats.norm(p_mean, p_std)
    value, _ = integrate.quad(
        lambda x: q.pdf(x) * function(q.logpdf(x) - p.logpdf(x)),
        q_mean - 30 * q_std,
        q_mean + 30 * q_std,
        points=[q_mean, p_mean],
        limit=500,
        epsabs=1e-13,
        epsrel=1e-13,
    )
    return value


ESTIMATORS = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio**2 / 2,
    "k3": lambda log_ratio: math.exp(min(-log_ratio, 700)) - 1 + log_ratio,
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_against_quadrature(pair, name):
    mean = quadrature(ESTIMATORS[name], *pair)
    var = quadrature(lambda log_ratio: (ESTIMATORS[name](log_ratio) - mean) ** 2, *pair)
    exact = moments(*pair)[name]
    assert exact.mean == pytest.approx(mean, abs=1e-11)
    assert exact.var == pytest.approx(var, rel=1e-8, abs=1e-11)


def test_the_variance_of_k3_is_infinite_exactly_where_the_sampler_is_too_narrow():
    seed_004 = moments(0.1, 0.2, 0.0, 1.0)
    assert seed_004["k3"].var == math.inf
    assert seed_004["k4"].var == math.inf
    assert seed_004["k3"].mean == seed_004["k1"].mean
    assert math.isfinite(seed_004["k1"].var)
    assert math.isfinite(seed_004["k2"].var)
    edge = math.sqrt(0.5)
    assert moments(0, edge * 0.999, 0.3, 1)["k3"].var == math.inf
    assert math.isfinite(moments(0, edge * 1.001, 0.3, 1)["k3"].var)
    assert not k3_variance_is_finite(0.2, 1.0)
    assert k3_variance_is_finite(1.0, 0.2)
    # The truncated integral indeed grows without bound, not merely slowly to a limit.
    q, p = stats.norm(0.1, 0.2), stats.norm(0, 1)
    partial = [
        integrate.quad(lambda x: math.exp(2 * p.logpdf(x) - q.logpdf(x)), 0, edge)[0]
        for edge in (2.0, 3.0)
    ]
    assert partial[1] > 1e10 * partial[0]


def test_tensors_broadcast_and_agree_with_numbers():
    q_std = torch.tensor([[0.5], [0.9], [1.7]])
    p_mean = torch.tensor([0.0, 0.4])
    table = moments(0.2, q_std, p_mean, 1.0)
    assert table["k3"].var.shape == (3, 2)
    for i in range(3):
        for j in range(2):
            one = moments(0.2, float(q_std[i]), float(p_mean[j]), 1.0)
            for name in one:
                assert float(table[name].var[i, j]) == pytest.approx(one[name].var, rel=1e-12)


def test_closed_forms_at_known_points():
    at = [torch.tensor(x, dtype=torch.float64) for x in (0.0, 1.0, 1.0, 1.0)]
    assert gaussian_kl(*at).item() == 0.5
    assert gaussian_chi_square(*at).item() == pytest.approx(math.e - 1, rel=1e-14)
    assert moments(0.4, 1.3, 0.4, 1.3)["k3"] == (0.0, 0.0)


@pytest.mark.parametrize("shift", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("std", [1.0, 3.7])
def test_a_small_shift_keeps_its_variance(shift, std):
    found = moments(0.0, std, shift * std, std)["k3"]
    assert found.mean == pytest.approx(shift**2 / 2, rel=1e-9, abs=0)
    # expm1(s^2) - s^2, right to float64's precision times s^2
    exact = shift**4 / 2 + shift**6 / 6 + shift**8 / 24
    assert found.var == pytest.approx(exact, rel=1e-9, abs=4e-16 * shift**2)
    back = gaussian_kl(*(torch.tensor(x, dtype=torch.float64) for x in (shift, 1.0, 0.0, 1.0)))
    assert back.item() == pytest.approx(shift**2 / 2, rel=1e-9, abs=0)
