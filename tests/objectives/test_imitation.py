"""The cost of imitation, against its recursion."""

from __future__ import annotations

import pytest

from analysis.objectives.imitation import imitation_cost


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
