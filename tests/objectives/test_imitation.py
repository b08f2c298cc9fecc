"""The cost of imitation, against its recursion."""

from __future__ import annotations

from decimal import Decimal, localcontext

import pytest

from kl_term.objectives.imitation import imitation_cost


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


@pytest.mark.parametrize(
    ("error", "horizon", "recovery"),
    [(1e-9, 10, 0.0), (1e-17, 10**6, 0.0), (1e-12, 1000, 1e-13), (1e-9, 999, 0.5), (1.0, 7, 0.8)],
)
def test_small_errors_cost_what_they_cost(error, horizon, recovery):
    if recovery == 0.0 and horizon > 1000:  # to first order in the error
        expected = error * horizon * (horizon + 1) / 2
    else:
        with localcontext(prec=200):  # the recursion; a double is exact in 200 digits
            enters, decay = Decimal(error), 1 - Decimal(error) - Decimal(recovery)
            off = expected = Decimal(0)
            for _ in range(horizon):
                off = enters + decay * off
                expected += off
    found = imitation_cost(error, horizon, recovery)
    assert found == pytest.approx(float(expected), rel=1e-9, abs=0)
