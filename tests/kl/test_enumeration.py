"""Every gradient against a sum written out in numpy, or against autograd through that sum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kl_term.kl.divergences import forward_kl, reverse_kl
from kl_term.kl.enumeration import (
    cosine,
    exact_kl_gradient,
    expected_gradient,
    forward_kl_gradient,
    gradient_moments,
    relative_error,
    reverse_kl_gradient,
)
from tests.trees import TIGHT


def score_expectation(policy, weights, coefficient):
    """sum_a w(a) c(a) (e_a - pi), written as an explicit loop over actions."""
    total = np.zeros_like(policy)
    for action in range(policy.shape[-1]):
        score = -policy.copy()
        score[..., action] += 1
        total += (weights * coefficient)[..., action : action + 1] * score
    return total


def by_autograd(divergence, logits, ref_logits):
    leaf = logits.clone().requires_grad_(True)
    return torch.autograd.grad(divergence(leaf, ref_logits).sum(), leaf)[0]


def test_closed_forms_against_autograd(logits, ref_logits):
    reverse = by_autograd(reverse_kl, logits, ref_logits)
    forward = by_autograd(forward_kl, logits, ref_logits)
    assert torch.allclose(reverse_kl_gradient(logits, ref_logits), reverse, **TIGHT)
    assert torch.allclose(forward_kl_gradient(logits, ref_logits), forward, **TIGHT)
    assert not torch.allclose(-reverse_kl_gradient(logits, ref_logits), reverse, atol=1e-3)
    assert not torch.allclose(reverse, forward, atol=1e-3)
    assert torch.equal(
        exact_kl_gradient(logits, ref_logits, direction="forward"),
        forward_kl_gradient(logits, ref_logits),
    )


#: Estimator, placement, weighting, samples of another policy, and the divergence it descends.
DESCENDS = [
    ("k1", "loss", "none", False, "nothing"),
    ("k2", "loss", "none", False, "reverse"),
    ("k3", "loss", "none", False, "forward"),
    ("k4", "loss", "none", False, "forward"),
    ("k1", "reward", "none", False, "reverse"),
    ("k2", "reward", "none", False, "neither"),
    ("k3", "reward", "none", False, "neither"),
    ("k1", "loss", "attached", True, "reverse"),
    ("k3", "loss", "attached", True, "reverse"),
    ("k4", "loss", "attached", True, "reverse"),
    ("k2", "loss", "detached", True, "reverse"),
    ("k3", "loss", "detached", True, "forward"),
    ("k1", "loss", "detached", True, "nothing"),
    ("k2", "loss", "attached", True, "neither"),
    ("k1", "loss", "none", True, "neither"),
    ("k2", "loss", "none", True, "neither"),
    ("k3", "loss", "none", True, "neither"),
]


@pytest.mark.parametrize(("estimator", "placement", "weighting", "stale", "divergence"), DESCENDS)
def test_what_each_choice_descends(
    logits, ref_logits, old_logits, estimator, placement, weighting, stale, divergence
):
    how = {"estimator": estimator, "placement": placement, "weighting": weighting}
    gradient = expected_gradient(logits, ref_logits, old_logits if stale else None, **how)
    assert (gradient.abs().max() < 1e-14) == (divergence == "nothing")
    for name, exact in {
        "reverse": reverse_kl_gradient(logits, ref_logits),
        "forward": forward_kl_gradient(logits, ref_logits),
    }.items():
        error = relative_error(gradient, exact)
        assert error.max() < 1e-11 if name == divergence else error.min() > 0.05


def test_k1_reward_off_policy_carries_the_samplers_log_ratio(
    logits, ref_logits, old_logits, policy, reference, sampler
):
    for weighting, weights in (("none", sampler), ("attached", policy), ("detached", policy)):
        how = {"estimator": "k1", "placement": "reward", "weighting": weighting}
        gradient = expected_gradient(logits, ref_logits, old_logits, **how)
        by_hand = score_expectation(policy, weights, np.log(sampler / reference))
        assert np.abs(gradient.numpy() - by_hand).max() < 1e-12


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_clip", "k4", "minimax01"])
@pytest.mark.parametrize("weighting", ["none", "attached", "detached"])
def test_moments_against_the_sum_over_actions(
    logits, ref_logits, old_logits, policy, reference, sampler, estimator, weighting
):
    log_ratio, ratio = np.log(policy / reference), reference / policy
    value = {
        "k1": log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": ratio - 1 + log_ratio,
        "k3_clip": np.minimum(ratio, 10) - 1 + log_ratio,
        "k4": ratio - 1 + log_ratio,
        "minimax01": (policy - reference) * np.log(policy),
    }[estimator]
    slope = {
        "k1": np.ones_like(ratio),
        "k2": log_ratio,
        "k3": 1 - ratio,
        "k3_clip": 1 - ratio * (ratio < 10),
        "k4": 1 - ratio,
        "minimax01": policy - reference,
    }[estimator]
    rho = policy / sampler
    coefficient = {
        "none": slope,
        "detached": rho * slope,
        "attached": rho * (value + slope),
    }[weighting]
    mean, trace_var = gradient_moments(
        logits, ref_logits, old_logits, estimator=estimator, weighting=weighting
    )
    by_hand = score_expectation(policy, sampler, coefficient)
    scale = max(1.0, np.abs(by_hand).max())
    assert np.abs(mean.numpy() - by_hand).max() < 1e-12 * scale
    spread = np.zeros(len(policy))
    for action in range(policy.shape[-1]):
        score = -policy.copy()
        score[:, action] += 1
        sample = coefficient[:, action : action + 1] * score
        spread += sampler[:, action] * ((sample - by_hand) ** 2).sum(-1)
    assert np.allclose(trace_var.numpy(), spread, rtol=1e-9, atol=1e-12)


def test_cosine_and_relative_error():
    u = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    v = torch.tensor([[4.0, 3.0], [1.0, 0.0]])
    assert cosine(u, v)[0] == pytest.approx(24 / 25)
    assert cosine(u, v)[1].isnan()
    assert relative_error(u, v)[0] == pytest.approx(2**0.5 / 5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_clip"])
@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_a_token_that_all_forbid_changes_nothing(estimator, placement):
    generator = torch.Generator().manual_seed(3)
    three = 2 * torch.randn(3, 5, generator=generator, dtype=torch.float64)
    masked = torch.cat([three, torch.full((3, 2), -torch.inf, dtype=torch.float64)], dim=-1)
    options = {"estimator": estimator, "placement": placement, "weighting": "attached"}
    few, all_of_it = (gradient_moments(*rows, **options) for rows in (three, masked))
    assert torch.allclose(all_of_it.mean[:5], few.mean, rtol=0, atol=1e-14)
    assert (all_of_it.mean[5:] == 0).all()
    assert torch.allclose(all_of_it.trace_var, few.trace_var, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_clip"])
def test_a_token_that_only_the_policy_forbids_is_never_drawn(estimator):
    logits, ref_logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(4)).double()
    logits[1] = -torch.inf
    gradient = expected_gradient(logits, ref_logits, estimator=estimator)
    assert gradient.isfinite().all() and gradient[1] == 0


WEIGHED = [
    *(("loss", "attached", name, True) for name in ("k1", "k3", "k4")),
    ("loss", "detached", "k2", True),
    ("reward", "attached", "k1", False),
    *(("loss", "detached", name, False) for name in ("k1", "k3_clip", "minimax01")),
    *(("loss", "attached", name, False) for name in ("k2", "k3_clip")),
]


@pytest.mark.parametrize(("placement", "weighting", "estimator", "is_kl"), WEIGHED)
def test_a_drawn_token_that_the_policy_forbids_adds_its_limit(
    placement, weighting, estimator, is_kl
):
    logits, ref_logits, old_logits = (
        torch.tensor(p, dtype=torch.float64).log()
        for p in ([0.6, 0.4, 0.0], [0.5, 0.4, 0.1], [0.3, 0.3, 0.4])
    )
    variant = {"estimator": estimator, "placement": placement, "weighting": weighting}
    found = expected_gradient(logits, ref_logits, old_logits, **variant)
    rare = torch.tensor([0.6, 0.4, 1e-30], dtype=torch.float64).log()
    limit = expected_gradient(rare, ref_logits, old_logits, **variant)
    assert torch.allclose(found, limit, **TIGHT)
    if is_kl:
        pull = 0.6 * 0.4 * math.log(0.6 / 0.5)
        assert found.tolist() == pytest.approx([pull, -pull, 0.0], abs=1e-12)
