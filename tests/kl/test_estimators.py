from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kl_term.kl import estimators
from kl_term.kl.divergences import forward_kl, reverse_kl
from kl_term.kl.estimators import k1, k2, k3, k3_clip, k4

LOGP = torch.tensor([-0.5, -2.0, -1.0, -4.0], dtype=torch.float64)
REF_LOGP = torch.tensor([-1.5, -0.7, -1.0, -0.5], dtype=torch.float64)


def test_hand_computed_values():
    # log-ratios 1, -1.3, 0, -3.5
    assert k1(LOGP, REF_LOGP).tolist() == pytest.approx([1.0, -1.3, 0.0, -3.5], abs=1e-15)
    assert k2(LOGP, REF_LOGP).tolist() == pytest.approx([0.5, 0.845, 0.0, 6.125], abs=1e-14)
    by_hand = [
        math.exp(-1) - 1 + 1,
        math.exp(1.3) - 1 - 1.3,
        0.0,
        math.exp(3.5) - 1 - 3.5,
    ]
    assert k3(LOGP, REF_LOGP).tolist() == pytest.approx(by_hand, abs=1e-13)
    capped = [*by_hand[:3], 10 - 1 - 3.5]
    assert k3_clip(LOGP, REF_LOGP).tolist() == pytest.approx(capped, abs=1e-13)
    assert k3_clip(LOGP, REF_LOGP, max_ratio=3.0)[1] == pytest.approx(3 - 1 - 1.3, abs=1e-14)


def expectation(estimator, logits, ref_logits, weights):
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (torch.from_numpy(weights) * estimator(logp, ref_logp)).sum(-1)


def test_k1_and_k3_are_unbiased_for_the_reverse_kl_on_policy(logits, ref_logits, policy):
    exact = reverse_kl(logits, ref_logits)
    for estimator in (k1, k3, k4):
        assert (expectation(estimator, logits, ref_logits, policy) - exact).abs().max() < 1e-11
        wrong = forward_kl(logits, ref_logits)
        assert (expectation(estimator, logits, ref_logits, policy) - wrong).abs().min() > 1e-3
    assert (expectation(k2, logits, ref_logits, policy) - exact).abs().min() > 1e-3


def test_k3_clip_is_biased_by_the_mass_above_the_cap(logits, ref_logits, policy, reference):
    excess = (policy * np.maximum(reference / policy - 2.0, 0)).sum(-1)
    mean = expectation(lambda a, b: k3_clip(a, b, max_ratio=2.0), logits, ref_logits, policy)
    exact = reverse_kl(logits, ref_logits).numpy()
    assert np.abs(mean.numpy() - (exact - excess)).max() < 1e-11
    assert excess.max() > 0.1


def test_k4_is_k3_in_value_and_gradient_even_at_the_tie():
    ref_log_ratio = torch.arange(-120, 121, dtype=torch.float64) / 20
    logp = ref_log_ratio.clone().requires_grad_(True)
    zeros = torch.zeros_like(ref_log_ratio)
    assert torch.equal(k4(logp, zeros), k3(logp, zeros))
    (of_k4,) = torch.autograd.grad(k4(logp, zeros).sum(), logp)
    (of_k3,) = torch.autograd.grad(k3(logp, zeros).sum(), logp)
    assert torch.equal(of_k4, of_k3)
    # The definition as usually coded leaves half of k1's gradient where pi = pi_ref.
    literal = torch.where(
        k1(logp, zeros) < 0,
        k3(logp, zeros),
        torch.minimum(k1(logp, zeros), k3(logp, zeros)),
    )
    (of_literal,) = torch.autograd.grad(literal.sum(), logp)
    assert of_literal[120].item() == 0.5
    assert of_k4[120].item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_k3_survives_low_precision(dtype):
    logp = torch.full((), -1.0).to(dtype) + torch.linspace(-0.25, 0.25, 101).to(dtype)
    ref_logp = torch.full_like(logp, -1.0)
    exact = k3(logp.double(), ref_logp.double())
    value = k3(logp, ref_logp)
    assert value.dtype == torch.float32
    assert (value >= 0).all()
    off = exact > 1e-9
    assert ((value.double() - exact).abs() / exact)[off].max() < 0.01


def test_nothing_is_clamped_unless_asked():
    far = torch.tensor([-100.0, 0.0])
    near = torch.tensor([0.0, -100.0])
    assert k3(far, near)[0] == math.inf
    assert k3(far, near)[1] == 99.0
    assert k1(far, near).tolist() == [-100.0, 100.0]
    assert k3_clip(far, near)[0] == pytest.approx(10 - 1 - 100.0)


@pytest.mark.parametrize("distance", [5.0, 80.0, 100.0, 1e4])
def test_the_capped_ratio_has_its_gradient_however_far_the_reference_is(distance):
    logp = torch.tensor([-distance], requires_grad=True)
    value = estimators.k3_clip(logp, torch.zeros(1))
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    assert value.item() == pytest.approx(9.0 - distance, rel=1e-6)
    assert gradient.item() == 1.0, "above the cap it pushes away, and is never NaN"


def test_a_clamp_on_the_value_of_k3_has_two_edges():
    """k3 = 10 at r near 13.6, a token given up, and at r near e^-11, one the reference forbids."""
    zero = torch.zeros(3, dtype=torch.float64)
    for edges, beyond in (((13.5, 13.8), [False, True]), ((1.66e-5, 1.68e-5), [True, False])):
        ratios = torch.tensor([*edges, 1.0], dtype=torch.float64)
        assert (k3(zero, ratios.log()) > 10).tolist() == [*beyond, False]
