from __future__ import annotations

import math

import pytest
import torch

from kl_term.kl.divergences import MAX_RATIO
from kl_term.kl.estimators import ESTIMATORS, TOKEN_ESTIMATORS
from kl_term.kl.potentials import kl_potential
from kl_term.kl.surrogates import (
    gradient_coefficient,
    kl_loss,
    kl_penalty,
    minimax01,
    straight_through,
)

LOGP = torch.tensor([[-0.5, -2.0, -1.0], [-4.0, -0.2, -3.0]], dtype=torch.float64)
REF_LOGP = torch.tensor([[-1.5, -0.7, -1.1], [-0.5, -0.9, -0.3]], dtype=torch.float64)
OLD_LOGP = torch.tensor([[-0.9, -1.6, -1.0], [-3.1, -0.5, -2.2]], dtype=torch.float64)


def gradient(loss, logp):
    return torch.autograd.grad(loss.sum(), logp, retain_graph=True)[0]


@pytest.fixture
def logp():
    return LOGP.clone().requires_grad_(True)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_loss_and_penalty_are_the_estimator_with_and_without_gradient(estimator, logp):
    for function, slopes in ((kl_loss, True), (kl_penalty, False)):
        found = function(logp, REF_LOGP, estimator=estimator)
        assert torch.equal(found, ESTIMATORS[estimator](LOGP, REF_LOGP))
        assert found.requires_grad == slopes
    assert ESTIMATORS[estimator](LOGP, LOGP).abs().max() == 0, "what masked positions hold"


@pytest.mark.parametrize("estimator", TOKEN_ESTIMATORS)
def test_the_coefficient_is_the_derivative(estimator, logp):
    by_autograd = gradient(kl_loss(logp, REF_LOGP, estimator=estimator), logp)
    coefficient = gradient_coefficient(LOGP, REF_LOGP, estimator=estimator)
    assert torch.allclose(by_autograd, coefficient, rtol=0, atol=1e-13)
    assert not coefficient.requires_grad


@pytest.mark.parametrize("function", [kl_loss, gradient_coefficient, kl_potential])
def test_an_estimator_that_is_not_in_the_table_is_refused_with_the_names_that_are(function):
    with pytest.raises(ValueError, match=r"estimator must be one of \['k1', .*, got 'k33'; did"):
        function(LOGP, REF_LOGP, estimator="k33")


def test_reference_and_sampler_get_no_gradient(logp):
    ref_logp = REF_LOGP.clone().requires_grad_(True)
    old_logp = OLD_LOGP.clone().requires_grad_(True)
    loss = kl_loss(logp, ref_logp, old_logp=old_logp, estimator="k3", weighting="attached").sum()
    grads = torch.autograd.grad(loss, (ref_logp, old_logp), allow_unused=True)
    assert grads == (None, None)


def test_minimax01_is_no_value_but_a_gradient(logp):
    coefficient = LOGP.exp() - REF_LOGP.exp()
    assert torch.allclose(gradient(minimax01(logp, REF_LOGP), logp), coefficient)


def test_straight_through_has_the_value_of_one_and_the_gradient_of_the_other(logp):
    value, slope = (kl_loss(logp, REF_LOGP, estimator=name) for name in ("k3", "k2"))
    loss = straight_through(value, slope)
    assert torch.allclose(loss, value, rtol=0, atol=1e-14)
    assert torch.allclose(gradient(loss, logp), gradient(slope, logp), rtol=0, atol=1e-14)
    assert (gradient(loss, logp) - gradient(value, logp)).abs().max() > 0.1
    assert (value - slope).abs().max() > 0.1


def test_straight_through_cancels_nothing():
    value, slope = torch.tensor([-59.0]), torch.tensor([4.2e25], requires_grad=True)
    assert straight_through(value, slope).item() == -59.0


def test_at_the_cap_autograd_and_the_coefficient_agree():
    logp = torch.tensor([-math.log(MAX_RATIO)], requires_grad=True)
    assert torch.expm1(-logp) == MAX_RATIO - 1, "float32 has a log-ratio at the cap itself"
    by_autograd = gradient(kl_loss(logp, torch.zeros_like(logp), estimator="k3_clip"), logp)
    found = gradient_coefficient(logp, torch.zeros_like(logp), estimator="k3_clip")
    assert torch.equal(by_autograd, found)
