"""Claims about whose samples train: simulations beside the exact values."""

from __future__ import annotations

import math

import pytest
import torch

from analysis.experiments.chapters import projection
from analysis.experiments.chapters.routing import random_head, routing_drift
from analysis.experiments.claims import whose_samples as claims
from analysis.objectives.routing import choose_experts


def test_ppo_compares_with_a_critic():
    found = claims.ppo_compares_with_a_critic()
    assert found.verdict == "fails"
    assert abs(found.figures["mean_against_reference"]) > 0.1


def test_covering_and_seeking():
    found = claims.covering_and_seeking()
    assert found.verdict == "holds if"
    assert found.figures["forward_std"] == pytest.approx(math.sqrt(0.25 + 0.21 * 16), rel=1e-4)
    assert found.figures["reverse_other_minimum"] == pytest.approx(-math.log(0.3), abs=1e-3)
    mixture = projection.Mixture()
    means, stds = torch.linspace(-3, 3, 25), torch.linspace(0.3, 3, 25)
    grid = [
        (projection.gaussian_kls(mixture, m.double(), s.double())[0].item(), m.item(), s.item())
        for m in means
        for s in stds
    ]
    value, mean, std = min(grid)
    assert mean == pytest.approx(-2.0, abs=0.13) and std < 0.7
    assert value > -math.log(0.7) - 1e-3


def test_keep_routing():
    found = claims.keep_routing()
    assert found.verdict == "holds"
    table = routing_drift([0.0], seeds=2)
    assert table.replayed.item() == table.recomputed.item() == table.flipped.item() == 0
    head = random_head(8, 16, 12, seed=0)
    hidden = torch.randn(50, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert len(choose_experts(head, hidden).unique()) > 3
