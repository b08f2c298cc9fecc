"""Annealing, masks of samples and segments, routing, and the cost of imitation."""

from __future__ import annotations

import pytest
import torch

from analysis.objectives.guidance import annealed, current_segment, low_reward_mask
from analysis.objectives.imitation import imitation_cost
from analysis.objectives.routing import ExpertHead, choose_experts, routed_logp


def test_annealing_ends_where_it_should():
    values = [annealed(n, 4, start=1.0, end=0.2) for n in (0, 1, 4, 9)]
    assert values == pytest.approx([1.0, 0.8, 0.2, 0.2])


def test_masks():
    assert low_reward_mask(torch.tensor([0.0, 0.5, 1.0]), 0.5).tolist() == [True, False, False]
    mask = torch.tensor([1, 1, 1, 0])
    sampled_at = torch.tensor([3, 4, 4, 4])
    assert current_segment(mask, sampled_at, 4).tolist() == [False, True, True, False]


@pytest.mark.parametrize(("error", "recovery"), [(0.1, 0.0), (0.1, 0.9), (0.3, 0.2), (1.0, 1.0)])
def test_imitation_cost_is_the_recursion(error, recovery):
    off, cost = 0.0, 0.0
    for horizon in range(1, 30):
        off = off * (1 - recovery) + (1 - off) * error
        cost += off
        assert imitation_cost(error, horizon, recovery) == pytest.approx(cost, abs=1e-12)


def test_imitation_cost_at_the_ends():
    assert imitation_cost(0.0, 50, 0.0) == 0.0
    assert imitation_cost(0.01, 50, 0.99) == pytest.approx(0.5)


def test_routed_logp_by_hand():
    generator = torch.Generator().manual_seed(0)
    head = ExpertHead(
        torch.randn(3, 4, generator=generator, dtype=torch.float64),
        torch.randn(3, 5, 4, generator=generator, dtype=torch.float64),
    )
    hidden = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    experts = choose_experts(head, hidden)
    got = routed_logp(head, hidden, experts)
    assert len(set(experts.tolist())) > 1
    for row, (state, expert) in enumerate(zip(hidden, experts, strict=True)):
        gates = torch.softmax(head.router @ state, -1)
        assert gates.argmax() == expert
        logits = gates[expert] * (head.experts[expert] @ state)
        assert torch.allclose(got[row], logits.log_softmax(-1))
    assert torch.allclose(got.exp().sum(-1), torch.ones(7, dtype=torch.float64))
    for unknown in (-1, 3):
        with pytest.raises(ValueError, match=r"experts must be in \[0, 3\)"):
            routed_logp(head, hidden, torch.full((7,), unknown))
