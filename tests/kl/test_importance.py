from __future__ import annotations

import math

import pytest
import torch

from kl_term.kl.importance import effective_sample_size, importance_ratio

LOGP = torch.tensor([[-0.5, -1.0, -2.0], [-0.1, -0.7, -9.0]], dtype=torch.float64)
OLD_LOGP = torch.tensor([[-0.7, -0.4, -1.1], [-0.9, -0.5, -8.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_levels_by_hand():
    e = math.exp
    at = lambda level: importance_ratio(LOGP, OLD_LOGP, MASK, level=level).tolist()
    assert at("token")[0] == pytest.approx([e(0.2), e(-0.6), e(-0.9)])
    assert at("token")[1] == pytest.approx([e(0.8), e(-0.2), 1.0])
    assert at("prefix")[0] == pytest.approx([e(0.2), e(-0.4), e(-1.3)])
    assert at("sequence")[0] == pytest.approx([e(-1.3)] * 3)
    assert at("geometric")[0] == pytest.approx([e(-1.3 / 3)] * 3)
    assert at("geometric")[1][:2] == pytest.approx([e(0.3)] * 2)


def test_sampler_gets_no_gradient_and_the_policy_does():
    logp, old_logp = (
        LOGP.clone().requires_grad_(True),
        OLD_LOGP.clone().requires_grad_(True),
    )
    ratio = importance_ratio(logp, old_logp, MASK)
    by_logp, by_old = torch.autograd.grad(ratio.sum(), (logp, old_logp), allow_unused=True)
    assert torch.allclose(by_logp, torch.where(MASK, ratio, 0.0))
    assert by_old is None


def test_effective_sample_size_by_hand():
    share = effective_sample_size(LOGP, OLD_LOGP, MASK)
    for row, mask, value in zip(LOGP - OLD_LOGP, MASK, share, strict=True):
        weights = row[mask].exp()
        assert value.item() == pytest.approx(
            (weights.sum() ** 2 / (len(weights) * weights.square().sum())).item(),
            abs=1e-12,
        )
    assert effective_sample_size(LOGP, LOGP, MASK).tolist() == pytest.approx([1.0, 1.0], abs=1e-14)


def test_extremes_stay_finite():
    logp = torch.tensor([0.0, -800.0, -800.0], dtype=torch.float64)
    old_logp = torch.tensor([-800.0, -1.0, -1.0], dtype=torch.float64)
    mask = torch.ones(3, dtype=torch.bool)
    assert effective_sample_size(logp, old_logp, mask).item() == pytest.approx(1 / 3, abs=1e-12)
    assert effective_sample_size(logp, old_logp, ~mask).isnan()
