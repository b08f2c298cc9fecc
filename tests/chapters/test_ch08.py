"""Chapter 8: limits of its orders and flows, and printed forms by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from analysis.chapters.ch08_reward_side import claims_on_rewards, orders, penalties
from analysis.evidence.stale_states import spread
from kl_term.kl.ascent import expected_ascent
from kl_term.kl.enumeration import relative_error, reverse_kl_gradient
from kl_term.kl.fixed_points import reverse_kl_optimum
from kl_term.kl.scores import expected_score
from kl_term.kl.sequences import enumerate_sequences
from tests.chapters.differences import kl, slope_of


@pytest.fixture(scope="module")
def prompts():
    return orders.random_prompts(8, 4, distance=1.0, seed=1)


def exact_gradient(prompts, beta):
    policy = prompts.logits.softmax(-1)
    centred = prompts.rewards - (policy * prompts.rewards).sum(-1, keepdim=True)
    return policy * centred - beta * reverse_kl_gradient(prompts.logits, prompts.ref_logits)


@pytest.mark.parametrize("group_size", [2, 4])
def test_leave_one_out_is_exact_for_every_group_size(prompts, group_size):
    mean = orders.order_moments(
        prompts, "kl_then_leave_one_out", beta=0.3, group_size=group_size
    ).mean
    assert relative_error(mean, exact_gradient(prompts, 0.3)).max() < 1e-12
    assert relative_error(mean, exact_gradient(prompts, 0.0)).min() > 0.01


def population_gradient(prompts, order, beta):
    """The limit of an order for large groups, ``eps = 0``; NaN where its divisor is zero."""
    policy = prompts.logits.softmax(-1)
    kl = prompts.logits.log_softmax(-1) - prompts.ref_logits.log_softmax(-1)
    penalised = prompts.rewards - beta * kl
    credit = {
        "kl_then_normalise": penalised / spread(penalised, policy),
        "normalise_then_kl": prompts.rewards / spread(prompts.rewards, policy) - beta * kl,
        "kl_then_leave_one_out": penalised,
    }[order]
    return expected_score(prompts.logits, policy * credit)


def test_population_limits_in_units_of_the_reward(prompts):
    """Times the spread of what was standardised, each limit is a sum of two exact gradients."""
    policy = prompts.logits.softmax(-1)
    kl = prompts.logits.log_softmax(-1) - prompts.ref_logits.log_softmax(-1)
    first = population_gradient(prompts, "kl_then_normalise", beta=0.3)
    scaled = first * spread(prompts.rewards - 0.3 * kl, policy)
    assert relative_error(scaled, exact_gradient(prompts, 0.3)).max() < 1e-12
    std = spread(prompts.rewards, policy)
    after = population_gradient(prompts, "normalise_then_kl", beta=0.3) * std
    of_kl = reverse_kl_gradient(prompts.logits, prompts.ref_logits)
    effective = exact_gradient(prompts, 0.0) - 0.3 * std * of_kl
    assert relative_error(after, effective).max() < 1e-12
    assert relative_error(after, exact_gradient(prompts, 0.3)).median() > 0.01


def test_the_limits_need_a_spread_that_is_not_zero(prompts):
    optimum = reverse_kl_optimum(prompts.rewards, prompts.ref_logits, beta=0.3)
    solved = prompts._replace(logits=optimum)
    first = population_gradient(solved, "kl_then_normalise", beta=0.3)
    assert not (first.norm(dim=-1) < 1e-3).all()  # rounding over rounding, or 0 / 0
    equal = prompts._replace(rewards=torch.zeros_like(prompts.rewards))
    second = population_gradient(equal, "normalise_then_kl", beta=0.3)
    assert second.isnan().all()
    third = population_gradient(equal, "kl_then_leave_one_out", beta=0.3)
    assert relative_error(third, exact_gradient(equal, 0.3)).max() < 1e-12
    at_optimum = population_gradient(solved, "kl_then_leave_one_out", beta=0.3)
    assert at_optimum.abs().max() < 1e-12


def test_large_groups_approach_the_population_limit():
    prompts = orders.random_prompts(4, 2, distance=0.5, seed=2)
    for order in ("kl_then_normalise", "normalise_then_kl"):
        limit = population_gradient(prompts, order, beta=0.3)
        errors = [
            relative_error(
                orders.order_moments(prompts, order, beta=0.3, group_size=size).mean,
                limit,
            ).max()
            for size in (2, 12)
        ]
        assert errors[1] < 0.5 * errors[0]


def test_force_on_two_tokens_is_restoring_for_k1_alone():
    log_odds = torch.tensor([-3.0, math.log(0.3 / 0.7), 0.0, 3.0], dtype=torch.float64)
    force = penalties.penalty_force(log_odds, 0.3)
    by_name = {name: rows.force.tolist() for name, rows in force.groupby("estimator")}
    for _, at_ref, near, _ in by_name.values():
        assert at_ref == pytest.approx(0, abs=1e-12)
        assert near < 0
    assert by_name["k1"][0] > 0 > by_name["k1"][3]
    for name in ("k2", "k3"):  # far away on either side the push is outwards
        assert by_name[name][0] < 0 < by_name[name][3]


def test_on_the_logits_k3_goes_on_to_one_token_and_k2_does_not():
    starts = orders.random_prompts(60, 5, distance=1.0, seed=4)
    left = {}
    for name in ("k2", "k3"):
        end = expected_ascent(
            starts.logits,
            torch.zeros_like(starts.rewards),
            starts.ref_logits,
            beta=1.0,
            estimator=name,
            placement="reward",
            steps=1000,
            step_size=2.0,
            geometry="plain",
        )
        left[name] = (end - starts.ref_logits.log_softmax(-1) > math.log(0.01)).sum(-1)
    assert (left["k3"] == 1).double().mean() > 0.95
    assert (left["k2"] > 1).double().mean() > 0.5


POLICY = torch.tensor([0.55, 0.35, 0.10], dtype=torch.float64)
REF = torch.tensor([0.20, 0.30, 0.50], dtype=torch.float64)
REWARDS = torch.tensor([0.0, 1.0, 0.4], dtype=torch.float64)
BETA = 0.3


def sampled_score_mean(weights: Tensor, count: int = 40_000, seed: int = 0) -> tuple[Tensor, float]:
    """Mean over tokens sampled from POLICY of weight times score, and five standard errors."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.multinomial(POLICY, count, replacement=True, generator=generator)
    eye = torch.eye(len(POLICY), dtype=POLICY.dtype)
    terms = weights[tokens].unsqueeze(-1) * (eye[tokens] - POLICY)
    return terms.mean(0), 5 * terms.std(0).max().item() / count**0.5


def test_sign_of_the_total_loss():
    """Descend the total loss as printed: the reward falls; as corrected, it rises."""

    def printed(p):
        reward_part = -(p * REWARDS).sum()
        return -(reward_part - BETA * kl(p, REF))

    def corrected(p):
        reward_part = (p * REWARDS).sum()
        return -(reward_part - BETA * kl(p, REF))

    start = (REF * REWARDS).sum()
    for loss, rises in ((printed, False), (corrected, True)):
        logits = REF.log()
        for _ in range(50):
            logits = logits - 0.5 * slope_of(loss, logits.softmax(-1))
        assert ((logits.softmax(-1) * REWARDS).sum() > start + 0.05).item() is rises
        assert ((logits.softmax(-1) * REWARDS).sum() < start - 0.05).item() is not rises


def test_doubled_probability():
    """Sampling already weighs a token with its probability: an extra factor is counted twice."""
    log_ratio = (POLICY / REF).log()
    exact = slope_of(lambda p: kl(p, REF), POLICY)
    correct, error = sampled_score_mean(log_ratio)
    doubled, other_error = sampled_score_mean(POLICY * log_ratio, seed=1)
    assert (correct - exact).abs().max() < error
    assert (doubled - exact).abs().max() > 3 * other_error
    constant, noise = sampled_score_mean(POLICY)  # the printed k1 loss, which should average to 0
    assert constant.abs().max() > 3 * noise


def test_folded_reward_is_ppos():
    """Sequences of two tokens by hand: the task reward passed through the return counts twice."""
    tree = enumerate_sequences(2, 2)
    assert tree.mask.all()
    found = claims_on_rewards.folded_reward_is_ppos()
    assert found.figures["last_token"] < 1e-10 < 0.05 < found.figures["own_token"]
    reward_per_token, tokens = 1.0, 2
    returned = [reward_per_token * (tokens - t) for t in range(tokens)]
    assert returned == [2.0, 1.0]  # the first token is credited with twice the reward
    assert found.figures["every_token"] > 5 * found.figures["own_token"]


@pytest.mark.parametrize(
    "decision",
    [
        claims_on_rewards.sign_of_the_total_loss,
        claims_on_rewards.doubled_probability,
        claims_on_rewards.equivalent_objective,
    ],
)
def test_a_perturbed_implementation_changes_the_verdict(monkeypatch, decision):
    before = decision().verdict
    true = claims_on_rewards.reverse_kl_gradient
    monkeypatch.setattr(claims_on_rewards, "reverse_kl_gradient", lambda *pair: -true(*pair))
    true_score = claims_on_rewards.expected_score
    monkeypatch.setattr(claims_on_rewards, "expected_score", lambda *pair: true_score(*pair) * 1.01)
    assert decision().verdict != before


def test_erratum_one_token_of_a_sequence():
    """The score of one token alone leaves out the gradient at every other state."""
    tree = enumerate_sequences(2, 2)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    rewards = torch.randn(4, generator=generator, dtype=torch.float64)

    def logp(table):
        return table.log_softmax(-1)[tree.states, tree.tokens]

    leaf = logits.clone().requires_grad_(True)
    (exact,) = torch.autograd.grad((logp(leaf).sum(-1).exp() * rewards).sum(), leaf)
    probability = logp(logits).sum(-1).exp()
    for tokens, same in (((0, 1), True), ((0,), False), ((1,), False)):
        leaf = logits.clone().requires_grad_(True)
        terms = probability * rewards * logp(leaf)[:, tokens].sum(-1)
        (gradient,) = torch.autograd.grad(terms.sum(), leaf)
        assert ((gradient - exact).abs().max() < 1e-12).item() is same


def test_erratum_log_likelihood_has_another_value():
    """The rewritten reward term has the gradient of the mean reward, not its value."""
    value = (POLICY * REWARDS).sum()
    rewritten = (POLICY * REWARDS * POLICY.log()).sum()
    assert (value - rewritten).abs() > 0.1
    same = slope_of(lambda p: (POLICY * REWARDS * p.log()).sum(), POLICY)
    assert (same - slope_of(lambda p: (p * REWARDS).sum(), POLICY)).abs().max() < 1e-8


def test_erratum_penalty_gradient_is_not_the_kls():
    """With k2 or k3 as weight, the mean of weight times score is not the gradient of the KL."""
    log_ratio = (POLICY / REF).log()
    exact = slope_of(lambda p: kl(p, REF), POLICY)
    for penalty, same in (
        (log_ratio, True),
        (log_ratio.square() / 2, False),
        (REF / POLICY - 1 + log_ratio, False),
    ):
        weighted = slope_of(lambda p, penalty=penalty: (p * penalty).sum(), POLICY)
        assert ((weighted - exact).abs().max() < 1e-8).item() is same
