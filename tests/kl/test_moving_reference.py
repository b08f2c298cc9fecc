"""A reference that moves: chains of runs against single ones, step by step and token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kl_term.kl.divergences import reverse_kl
from kl_term.kl.fixed_points import reverse_kl_optimum
from kl_term.kl.mirror_steps import mirror_step
from kl_term.kl.moving_reference import (
    averaged_coefficient,
    coefficient_of_kl,
    merged_coefficient,
    partial_coefficient,
)

SIZES = (2, 3, 7, 12)


def problem(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rewards, and a reference that is far from even."""
    generator = torch.Generator().manual_seed(100 * size + seed)
    rewards, logits = torch.randn(2, size, generator=generator, dtype=torch.float64)
    return 2 * rewards, (3 * logits).log_softmax(-1)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.exp() - other.exp()).abs().max())


def log_apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize("size", SIZES)
def test_resets_are_one_run_whose_inverse_coefficients_add_up(size):
    rewards, policy = problem(size)
    reference = policy
    betas = (0.7, 3.0, 0.4, 1.1)
    for beta in betas:
        policy = reverse_kl_optimum(rewards, policy, beta=beta)
    one = merged_coefficient(betas)
    assert apart(policy, reverse_kl_optimum(rewards, reference, beta=one)) < 1e-12
    wrong = (sum(betas) / 4, sum(betas), 1 / one)
    ends = [reverse_kl_optimum(rewards, reference, beta=beta) for beta in wrong]
    assert min(log_apart(policy, end) for end in ends) > 0.1
    assert merged_coefficient([0.6] * 3) == pytest.approx(0.2, rel=1e-14)


#: Answers of ragged length over three tokens; 2 ends an answer, and so does the third token.
ANSWERS = ("2", "02", "12", "000", "001", "002", "010", "011", "012", "100", "101", "102", "112")


def by_tokens(logp: dict[str, float]) -> dict[str, dict[str, float]]:
    """Log-probs of answers -> of each next token at every prefix."""
    prefixes = sorted({answer[:n] for answer in logp for n in range(len(answer))}, key=len)

    def mass(prefix: str) -> float:
        return sum(math.exp(value) for answer, value in logp.items() if answer.startswith(prefix))

    return {
        prefix: {
            token: math.log(mass(prefix + token) / mass(prefix))
            for token in "012"
            if any(answer.startswith(prefix + token) for answer in logp)
        }
        for prefix in prefixes
    }


def soft_step(
    table: dict[str, dict[str, float]], rewards: dict[str, float], beta: float
) -> dict[str, dict[str, float]]:
    """The optimum over whole answers, by the soft Bellman equation from the ends backwards."""

    def value(prefix: str) -> float:
        if prefix in rewards:
            return rewards[prefix]
        rows = table[prefix].items()
        return beta * math.log(sum(math.exp(l + value(prefix + t) / beta) for t, l in rows))

    return {
        prefix: {t: l + (value(prefix + t) - value(prefix)) / beta for t, l in row.items()}
        for prefix, row in table.items()
    }


def test_over_answers_of_ragged_length_the_same_holds_token_by_token():
    rewards, reference = problem(len(ANSWERS))
    of_answer = dict(zip(ANSWERS, rewards.tolist(), strict=True))
    table = by_tokens(dict(zip(ANSWERS, reference.tolist(), strict=True)))
    for beta in (0.5, 1.5):
        table = soft_step(table, of_answer, beta)
    found = [sum(table[a[:n]][a[n]] for n in range(len(a))) for a in ANSWERS]
    one = reverse_kl_optimum(rewards, reference, beta=merged_coefficient([0.5, 1.5]))
    assert apart(torch.tensor(found, dtype=torch.float64), one) < 1e-12


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rate", [0.0, 0.05, 0.6, 1.0])
def test_a_geometric_average_is_one_run(size, rate):
    rewards, anchor = problem(size)
    reference, beta, updates = anchor, 0.9, 5
    for _ in range(updates):
        policy = reverse_kl_optimum(rewards, anchor, beta=beta)
        anchor = ((1 - rate) * anchor + rate * policy).log_softmax(-1)
    end = reverse_kl_optimum(rewards, anchor, beta=beta)
    one = averaged_coefficient(beta, rate=rate, updates=updates)
    assert apart(end, reverse_kl_optimum(rewards, reference, beta=one)) < 1e-12
    late = averaged_coefficient(beta, rate=rate, updates=updates + 1)
    if rate:
        assert log_apart(end, reverse_kl_optimum(rewards, reference, beta=late)) > 1e-2
    assert averaged_coefficient(beta, rate=1.0, updates=updates) == pytest.approx(
        merged_coefficient([beta] * (updates + 1))
    )


@pytest.mark.parametrize("size", SIZES)
def test_runs_that_stop_early_are_one_run(size):
    rewards, policy = problem(size)
    reference, beta, step = policy, 0.8, 0.3
    counts = (1, 4, 2, 9)
    for count in counts:
        anchor = policy
        for _ in range(count):
            policy = mirror_step(policy, anchor, rewards, beta=beta, step_size=step)
    one = partial_coefficient(beta, step_size=step, steps=counts)
    assert apart(policy, reverse_kl_optimum(rewards, reference, beta=one)) < 1e-12
    assert log_apart(policy, reverse_kl_optimum(rewards, reference, beta=beta / 4)) > 0.1


def test_a_reset_at_every_step_is_no_kl_term_and_complete_runs_are_resets():
    for beta in (0.1, 0.9, 3.0):
        none = partial_coefficient(beta, step_size=0.3, steps=[1] * 10)
        assert none == pytest.approx(1 / (0.3 * 10), rel=1e-12)
    complete = partial_coefficient(2.0, step_size=0.5, steps=[1, 3, 2])
    assert complete == pytest.approx(merged_coefficient([2.0] * 3))


@pytest.mark.parametrize("size", SIZES)
def test_a_trust_region_has_its_coefficient(size):
    rewards, reference = problem(size)
    most = -float(reference[rewards.argmax()])
    for share in (1e-3, 0.1, 0.5, 0.99):
        beta = float(coefficient_of_kl(rewards, reference, kl=share * most))
        policy = reverse_kl_optimum(rewards, reference, beta=beta)
        assert float(reverse_kl(policy, reference)) == pytest.approx(share * most, rel=1e-8)
    assert coefficient_of_kl(rewards, reference, kl=1.01 * most).isnan()


def test_a_small_trust_region_is_a_coefficient_that_goes_with_its_root():
    rewards, reference = problem(7)
    mass = reference.exp()
    variance = float(mass @ (rewards - mass @ rewards).square())
    for kl in (1e-4, 1e-6):
        beta = float(coefficient_of_kl(rewards, reference, kl=kl))
        assert beta == pytest.approx(math.sqrt(variance / (2 * kl)), rel=5 * kl**0.5)


def test_equal_rewards_and_forbidden_answers():
    reference = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).log()
    assert coefficient_of_kl(torch.ones(3).double(), reference, kl=0.1).isnan()
    found = coefficient_of_kl(torch.tensor([0.0, 1.0, 9.0]).double(), reference, kl=0.1)
    two = coefficient_of_kl(torch.tensor([0.0, 1.0]).double(), reference[:2], kl=0.1)
    assert float(found) == pytest.approx(float(two), rel=1e-12)


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("betas is empty", lambda: merged_coefficient([])),
        ("betas must be", lambda: merged_coefficient([1.0, 0.0])),
        ("rate must be", lambda: averaged_coefficient(1.0, rate=1.5, updates=1)),
        ("updates must be", lambda: averaged_coefficient(1.0, rate=0.5, updates=-1)),
        ("at least one run", lambda: partial_coefficient(1.0, step_size=0.1, steps=[])),
        ("steps must be", lambda: partial_coefficient(1.0, step_size=0.1, steps=[3, 0])),
        ("beyond the optimum", lambda: partial_coefficient(1.0, step_size=1.1, steps=[1])),
        ("kl must be", lambda: coefficient_of_kl(torch.zeros(2), torch.zeros(2), kl=0.0)),
    ],
)
def test_refusals(match, call):
    with pytest.raises(ValueError, match=match):
        call()
