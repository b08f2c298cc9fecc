"""What each term descends, against its expected gradient."""

from __future__ import annotations

import pytest
import torch

from kl_term.kl.divergences import capped_forward_kl, forward_kl, reverse_kl
from kl_term.kl.enumeration import expected_gradient
from kl_term.kl.estimators import ESTIMATORS, POTENTIALS
from kl_term.kl.potentials import kl_potential


@pytest.mark.parametrize("estimator", POTENTIALS)
@pytest.mark.parametrize("use", [("loss", "none"), ("loss", "attached"), ("reward", "none")])
def test_the_potential_is_what_the_samples_descend(estimator, use, logits, ref_logits):
    placement, weighting = use
    variant = {"estimator": estimator, "placement": placement, "weighting": weighting}
    leaf = (2 * logits).requires_grad_(True)
    if estimator not in ESTIMATORS and use != ("loss", "none"):
        with pytest.raises(ValueError, match="but no value"):
            kl_potential(leaf, ref_logits, **variant)
        return
    (slope,) = torch.autograd.grad(kl_potential(leaf, ref_logits, **variant).sum(), leaf)
    mean = expected_gradient(2 * logits, ref_logits, 2 * logits, **variant)
    assert torch.allclose(slope, mean, rtol=0, atol=1e-12)
    if (estimator, placement, weighting) != ("k1", "loss", "none"):
        assert not torch.allclose(-slope, mean, atol=1e-3)


@pytest.mark.parametrize("estimator", POTENTIALS)
@pytest.mark.parametrize("use", [("loss", "none"), ("loss", "attached"), ("reward", "none")])
def test_a_token_that_both_forbid_adds_nothing(estimator, use, logits, ref_logits):
    if estimator not in ESTIMATORS and use != ("loss", "none"):
        return
    variant = {"estimator": estimator, "placement": use[0], "weighting": use[1]}
    found = []
    for pair in ((logits, ref_logits), (with_a_forbidden(logits), with_a_forbidden(ref_logits))):
        leaf = pair[0].clone().requires_grad_(True)
        value = kl_potential(leaf, pair[1], **variant)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
        found.append((value.detach(), slope[..., : logits.shape[-1]]))
        assert (slope[..., logits.shape[-1] :] == 0).all()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_potential_of_k1_is_zero_bit_for_bit_and_where_a_token_is_forbidden(dtype):
    zero = POTENTIALS["k1"]
    for scale in (1e-30, 1.0, 1e30):
        draws = torch.Generator().manual_seed(3)
        pair = scale * torch.randn(2, 50, 7, generator=draws, dtype=dtype)
        plain = (pair[0] * 0.0 + pair[1] * 0.0).sum(-1)
        assert torch.equal(zero(*pair), plain)
        assert torch.equal(zero(*pair).signbit(), plain.signbit())
    logits, ref_logits = pair
    logits[:, 0], ref_logits[:, 1] = -torch.inf, -torch.inf
    leaf = logits.requires_grad_(True)
    value = zero(leaf, ref_logits)
    assert (value == 0).all()
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    assert (slope == 0).all()
    for shown in (torch.nan, torch.inf):
        assert zero(torch.full_like(ref_logits, shown), ref_logits).isnan().all()
        assert zero(logits, torch.full_like(ref_logits, shown)).isnan().all()


def with_a_forbidden(logits):
    return torch.cat([logits, torch.full_like(logits[..., :1], -torch.inf)], dim=-1)


def test_k3_in_the_reward_is_reverse_minus_forward(logits, ref_logits):
    value = kl_potential(logits, ref_logits, estimator="k3", placement="reward")
    expected = reverse_kl(logits, ref_logits) - forward_kl(logits, ref_logits)
    assert torch.allclose(value, expected, rtol=0, atol=1e-12)


def test_the_cap_only_lowers_the_forward_kl(logits, ref_logits):
    capped = capped_forward_kl(3 * logits, ref_logits)
    assert (capped <= forward_kl(3 * logits, ref_logits)).all()
    assert (capped < forward_kl(3 * logits, ref_logits) - 1e-3).any()
    assert torch.allclose(
        capped_forward_kl(logits, ref_logits, max_ratio=1e9), forward_kl(logits, ref_logits)
    )
