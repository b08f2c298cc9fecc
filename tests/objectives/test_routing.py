"""Log-probs through given experts, state by state."""

from __future__ import annotations

import pytest
import torch

from kl_term.objectives.routing import ExpertHead, choose_experts, routed_logp


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
    with pytest.raises(ValueError, match=r"head\.router needs torch\.float64 \[N, 4\]"):
        routed_logp(head, hidden[:, :3], experts)
