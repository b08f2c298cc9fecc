from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from analysis.kl.divergences import chi_square, entropy, forward_kl, reverse_kl
from analysis.kl.enumeration import reverse_kl_gradient

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
