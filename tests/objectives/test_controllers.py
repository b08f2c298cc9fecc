"""Controllers of the coefficient: by hand, and on a policy that follows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kl_term.objectives.controllers import (
    doubling_step,
    multiplier_step,
    proportional_step,
    steady_horizon,
)


def test_the_proportional_step_by_hand():
    at = {"target": 0.1, "horizon": 10.0}
    assert proportional_step(2.0, 0.1, **at) == 2.0
    assert proportional_step(1.0, 0.11, **at) == pytest.approx(1.01)
    assert proportional_step(1.0, 5.0, **at) == pytest.approx(1.02)
    assert proportional_step(1.0, -5.0, **at) == pytest.approx(0.98)
    assert proportional_step(1.0, 5.0, **at, clip=math.inf) == pytest.approx(5.9)
    assert proportional_step(1.0, -5.0, **at, clip=math.inf) == 0.0


def test_doubling_by_hand_and_its_band():
    assert doubling_step(1.0, 1.6, target=1.0) == 2.0
    assert doubling_step(1.0, 0.6, target=1.0) == 0.5
    for kl in (0.7, 1.0, 1.4):
        assert doubling_step(1.0, kl, target=1.0) == 1.0


def test_the_multiplier_by_hand_stays_at_zero_inside_the_region():
    assert multiplier_step(1.0, 0.5, target=0.3, rate=2.0) == pytest.approx(1.4)
    assert multiplier_step(0.1, 0.1, target=0.3, rate=2.0) == 0.0
    assert multiplier_step(0.0, 0.1, target=0.3, rate=2.0) == 0.0


def loop(horizon: float, elasticity: float, follow: float, gain: float, steps: int) -> np.ndarray:
    """log KL over its target: a policy that makes up a share of its distance, KL = tilt ** E."""
    tilt, base = 1.02, 0.0
    found = []
    for _ in range(steps):
        error = tilt**elasticity - 1
        found.append(elasticity * math.log(tilt))
        beta = math.exp(base) * (1 + gain * error)
        tilt += follow * (1 - beta * tilt)
        base += math.log1p(error / horizon)
    return np.array(found)


@pytest.mark.parametrize("elasticity", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("follow", [0.02, 0.2])
@pytest.mark.parametrize("proportional", [0.0, 1.0])
def test_the_steady_horizon_is_the_border_of_overshooting(elasticity, follow, proportional):
    border = steady_horizon(elasticity=elasticity, follow=follow, proportional=proportional)
    gain, steps = proportional / elasticity, int(60 / follow)
    above = loop(1.1 * border, elasticity, follow, gain, steps)
    below = loop(0.5 * border, elasticity, follow, gain, steps)
    crossings = lambda path: int((np.diff(np.sign(path[np.abs(path) > 1e-13])) != 0).sum())
    assert crossings(above) <= 1 < crossings(below)
    assert abs(above[-1]) < 1e-3


@pytest.mark.parametrize("elasticity", [2.0, 5.0])
def test_a_horizon_below_the_elasticity_does_not_settle(elasticity):
    settles = abs(loop(1.3 * elasticity, elasticity, 0.3, 0.0, 2000)[-50:]).max()
    swings = abs(loop(0.9 * elasticity, elasticity, 0.3, 0.0, 2000)[-50:]).max()
    assert settles < 1e-6 < 0.1 < swings


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("target", lambda: proportional_step(1.0, 0.1, target=0.0, horizon=10.0)),
        ("horizon", lambda: proportional_step(1.0, 0.1, target=0.1, horizon=-1.0)),
        ("clip must", lambda: proportional_step(1.0, 0.1, target=0.1, horizon=1.0, clip=0.0)),
        ("below horizon", lambda: proportional_step(1.0, 0.1, target=0.1, horizon=0.1)),
        ("target", lambda: doubling_step(1.0, 0.1, target=-0.1)),
        ("rate", lambda: multiplier_step(1.0, 0.1, target=0.1, rate=0.0)),
        ("elasticity", lambda: steady_horizon(elasticity=0.0, follow=0.1)),
        ("by itself", lambda: steady_horizon(elasticity=2.0, follow=0.6, proportional=1.0)),
    ],
)
def test_refusals(match, call):
    with pytest.raises(ValueError, match=match):
        call()
