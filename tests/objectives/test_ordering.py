"""The three orders by hand, what a rescaled or a constant reward does to each, and refusals."""

from __future__ import annotations

import statistics

import pytest
import torch

from kl_term.objectives.ordering import (
    ORDERS,
    kl_then_leave_one_out,
    kl_then_normalise,
    normalise_then_kl,
)

REWARDS = torch.tensor([1.0, 0.0, 0.5, 1.0], dtype=torch.float64)
KL = torch.tensor([0.3, -0.2, 1.1, 0.4], dtype=torch.float64)
BETA = 0.5


def test_by_hand():
    rewards, kl = REWARDS.tolist(), KL.tolist()
    scores = [r - BETA * k for r, k in zip(rewards, kl, strict=True)]
    first = [(s - statistics.mean(scores)) / statistics.stdev(scores) for s in scores]
    after = [
        (r - statistics.mean(rewards)) / statistics.stdev(rewards) - BETA * k
        for r, k in zip(rewards, kl, strict=True)
    ]
    others = [s - (sum(scores) - s) / 3 for s in scores]
    options = {"beta": BETA, "eps": 0.0}
    assert kl_then_normalise(REWARDS, KL, **options).tolist() == pytest.approx(first, abs=1e-12)
    assert normalise_then_kl(REWARDS, KL, **options).tolist() == pytest.approx(after, abs=1e-12)
    assert kl_then_leave_one_out(REWARDS, KL, beta=BETA).tolist() == pytest.approx(
        others, abs=1e-12
    )
    assert max(abs(a - b) for a, b in zip(first, after, strict=True)) > 0.1


def test_equal_rewards_let_the_kl_alone_fill_the_scale():
    equal = torch.ones_like(REWARDS)
    blown_up = [kl_then_normalise(equal, KL, beta=beta, eps=0.0) for beta in (1e-6, 1.0)]
    torch.testing.assert_close(*blown_up, rtol=0, atol=1e-9)
    assert blown_up[0].std().item() == pytest.approx(1.0)
    torch.testing.assert_close(normalise_then_kl(equal, KL, beta=BETA), -BETA * KL)
    assert kl_then_leave_one_out(equal, KL, beta=1e-6).abs().max() < 1e-5


def test_only_normalise_then_kl_forgets_the_scale_of_the_rewards_against_the_kl():
    def kl_share(order, scale):
        """How much of an advantage the KL makes up: what doubling beta adds, over the advantage."""
        once, none = (ORDERS[order](scale * REWARDS, KL, beta=b) for b in (1e-4, 0.0))
        return ((once - none).norm() / none.norm()).item()

    for order in ("kl_then_normalise", "kl_then_leave_one_out"):
        assert kl_share(order, 1.0) / kl_share(order, 10.0) == pytest.approx(10, rel=0.01)
    assert kl_share("normalise_then_kl", 1.0) == pytest.approx(
        kl_share("normalise_then_kl", 10.0), rel=0.01
    )


@pytest.mark.parametrize("order", ORDERS)
def test_advantages_carry_no_gradient(order):
    kl = KL.clone().requires_grad_(True)
    assert not ORDERS[order](REWARDS.clone().requires_grad_(True), kl, beta=BETA).requires_grad
