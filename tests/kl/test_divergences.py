from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kl_term.kl.divergences import capped_forward_kl, chi_square, entropy, forward_kl, reverse_kl
from kl_term.kl.enumeration import reverse_kl_gradient

INF = math.inf


def test_against_sums_in_numpy(logits, ref_logits, policy, reference):
    reverse = (policy * np.log(policy / reference)).sum(-1)
    forward = (reference * np.log(reference / policy)).sum(-1)
    assert np.abs(reverse_kl(logits, ref_logits).numpy() - reverse).max() < 1e-12
    assert np.abs(forward_kl(logits, ref_logits).numpy() - forward).max() < 1e-12
    chi = (reference**2 / policy).sum(-1) - 1
    assert np.allclose(chi_square(logits, ref_logits).numpy(), chi, rtol=1e-12, atol=0)
    assert np.abs(entropy(logits).numpy() + (policy * np.log(policy)).sum(-1)).max() < 1e-12


@pytest.mark.parametrize("divergence", [reverse_kl, forward_kl, chi_square])
def test_zero_at_the_reference_and_blind_to_the_normaliser(divergence, logits, ref_logits):
    assert divergence(logits, logits).abs().max() == 0
    assert torch.allclose(
        divergence(logits + 7.0, ref_logits - 3.0),
        divergence(logits, ref_logits),
        rtol=1e-12,
    )


def test_forbidden_tokens_contribute_their_limit():
    logits = torch.tensor([0.3, -INF, 1.1], dtype=torch.float64, requires_grad=True)
    ref_logits = torch.tensor([-0.4, -INF, 0.2], dtype=torch.float64)
    value = reverse_kl(logits, ref_logits)
    kept = torch.tensor([0, 2])
    assert torch.allclose(value, reverse_kl(logits[kept], ref_logits[kept]), rtol=1e-12)
    (gradient,) = torch.autograd.grad(value, logits)
    assert gradient.isfinite().all()
    assert gradient[1] == 0
    assert entropy(logits).isfinite()


def test_a_forbidden_token_that_the_other_side_allows_is_infinitely_far():
    full = torch.tensor([0.0, 0.5, 1.0])
    cut = torch.tensor([0.0, -INF, 1.0])
    assert reverse_kl(full, cut) == INF
    assert forward_kl(cut, full) == INF
    assert chi_square(cut, full) == INF
    assert reverse_kl(cut, full).isfinite()
    assert forward_kl(full, cut).isfinite()
    assert chi_square(full, cut).isfinite()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["policy", "reference"])
def test_what_is_not_finite_stays_visible(bad, place):
    logits, ref_logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    (logits if place == "policy" else ref_logits)[1, 2] = bad
    for divergence in (reverse_kl, forward_kl, chi_square):
        found = divergence(logits, ref_logits)
        assert found[1].isnan() and found[[0, 2]].isfinite().all(), divergence.__name__
    if place == "policy":
        assert entropy(logits)[1].isnan()
    gradient = reverse_kl_gradient(logits, ref_logits)
    assert gradient[1].isnan().any() and gradient[[0, 2]].isfinite().all()


def test_a_row_without_any_allowed_token_is_no_distribution():
    nothing = torch.full((4,), -math.inf)
    assert reverse_kl(nothing, torch.zeros(4)).isnan()
    assert entropy(nothing).isnan()


@pytest.mark.parametrize("drift", [1e-2, 1e-3, 1e-4])
def test_chi_square_of_a_small_drift_survives_float32(drift):
    noise = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 32_000, generator=noise)
    ref_logits = logits + drift * torch.randn(20, 32_000, generator=noise)
    policy, reference = (x.double().softmax(-1) for x in (logits, ref_logits))
    exact = ((reference - policy).square() / policy).sum(-1)
    # What is left is the rounding of the two log-softmaxes, about 1e-6 of a ratio.
    tolerance = 1e-6 / drift + 1e-4
    assert ((chi_square(logits, ref_logits) / exact - 1).abs() < tolerance).all()


def test_chi_square_overflows_with_its_sum_and_not_before():
    logits, ref_logits = torch.tensor([0.0, -70.0]), torch.tensor([0.0, -1.0])
    exact = chi_square(logits.double(), ref_logits.double())
    assert exact.item() == pytest.approx(math.exp(70) * (math.e + 1) ** -2, rel=1e-9)
    assert chi_square(logits, ref_logits).item() == pytest.approx(exact.item(), rel=1e-4)
    forbidden = torch.tensor([-INF, 0.0, 0.0]), torch.tensor([-INF, 0.0, -INF])
    assert chi_square(*forbidden).item() == pytest.approx(1.0)
    assert chi_square(*reversed(forbidden)) == INF


def test_capped_forward_kl_of_what_one_side_forbids():
    half, one = torch.zeros(2, dtype=torch.float64), torch.tensor([0.0, -INF], dtype=torch.float64)
    assert capped_forward_kl(half, one).item() == pytest.approx(math.log(2), abs=1e-15)
    expected = 0.5 * math.log(0.5) + 0.5 * math.log(10)
    assert capped_forward_kl(one, half).item() == pytest.approx(expected, abs=1e-15)
