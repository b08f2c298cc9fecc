"""Prompt weights against an enumeration of all groups, their integral against quadrature."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch

from kl_term.objectives.advantages import group_centre, group_normalise, leave_one_out
from kl_term.objectives.difficulty import arcsine_objective, difficulty_weight, normalised_objective

P = torch.tensor([0.03, 0.31, 0.5, 0.88], dtype=torch.float64)


def enumerated_weight(p: float, size: int, advantage) -> float:
    """Weight of a two-outcome policy: expected group gradient over the gradient of p."""
    total = 0.0
    for group in itertools.product((0.0, 1.0), repeat=size):
        chance = math.prod(p if r else 1 - p for r in group)
        scores = torch.tensor([1 / p if r else -1 / (1 - p) for r in group], dtype=torch.float64)
        advantages = advantage(torch.tensor(group, dtype=torch.float64))
        total += chance * (advantages * scores).mean().item()
    return total


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("ddof", [0, 1])
def test_weight_is_the_enumerated_one(size, ddof):
    weight = difficulty_weight(P, size, ddof=ddof, eps=0.01)
    for p, got in zip(P.tolist(), weight.tolist(), strict=True):
        exact = enumerated_weight(p, size, lambda r: group_normalise(r, ddof=ddof, eps=0.01))
        assert got == pytest.approx(exact, abs=1e-12)
        other = enumerated_weight(p, size, lambda r: group_normalise(r, ddof=1 - ddof, eps=0.01))
        assert abs(got - other) > 1e-3


@pytest.mark.parametrize("size", [2, 5])
def test_centred_and_leave_one_out_weigh_every_prompt_alike(size):
    for p in P.tolist():
        assert enumerated_weight(p, size, group_centre) == pytest.approx((size - 1) / size)
        assert enumerated_weight(p, size, leave_one_out) == pytest.approx(1.0)


@pytest.mark.parametrize("size", [2, 3, 8, 17])
def test_objective_is_the_integral_of_the_weight(size):
    grid = torch.linspace(0, 0.7, 20_001, dtype=torch.float64)
    area = torch.trapezoid(difficulty_weight(grid, size), grid)
    end = normalised_objective(torch.tensor(0.7, dtype=torch.float64), size)
    assert end.item() == pytest.approx(area.item(), rel=1e-7)


def test_large_groups_reach_the_arcsine_and_small_ones_are_bounded():
    p = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    limit = 1 / (p * (1 - p)).sqrt()
    assert torch.allclose(difficulty_weight(p, 1000, ddof=0, eps=0.0), limit, rtol=5e-3)
    gap = arcsine_objective(p) - normalised_objective(p, 1000, ddof=0, eps=0.0)
    assert gap.abs().max() < 0.07
    edge = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert difficulty_weight(edge, 9, ddof=0, eps=0.0).tolist() == pytest.approx([8**0.5] * 2)
    derivative = torch.autograd.functional.jacobian(arcsine_objective, p).diagonal()
    assert torch.allclose(derivative, limit)


def test_a_group_of_two_is_not_reweighted():
    assert torch.allclose(difficulty_weight(P, 2, eps=0.0), torch.full_like(P, 0.5**0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [134, 256, 1100])
def test_large_groups_neither_overflow_nor_lose_a_chance(size, dtype):
    inverse = [1 / (math.sqrt(k * (size - k) / size / (size - 1)) + 0.01) for k in range(1, size)]
    for p in (0.5, 0.01):
        odds = Fraction(p)
        free = exact_binomial(odds, size - 2)
        weight = (size - 1) / size * sum(c * s for c, s in zip(free, inverse, strict=True))
        drawn = exact_binomial(odds, size - 1)
        above = [math.fsum(drawn[k:]) for k in range(1, size)]
        area = sum(c * s for c, s in zip(above, inverse, strict=True)) / size
        success = torch.tensor(p, dtype=dtype)
        tolerance = 1e-6 if dtype == torch.float32 else 1e-11
        found = difficulty_weight(success, size, eps=0.01)
        assert found.dtype == dtype
        assert found.item() == pytest.approx(weight, rel=tolerance)
        objective = normalised_objective(success, size, eps=0.01)
        assert objective.item() == pytest.approx(area, rel=tolerance)


def exact_binomial(p: Fraction, trials: int) -> list[float]:
    """In integers, rounded once: Python divides integers of any size correctly."""
    right, wrong, whole = p.numerator, p.denominator - p.numerator, p.denominator**trials
    return [
        math.comb(trials, k) * right**k * wrong ** (trials - k) / whole for k in range(trials + 1)
    ]
